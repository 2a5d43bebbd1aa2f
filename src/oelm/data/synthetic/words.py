"""The words and sentences of the built-in stories.

In a sentence, {a} and {b} are people, {x} is a thing, {c} its colour, {p} its spot, {k} a kind of pet, {n} a pet's
name, {f} a food, {t} a location in town, {w} weather, {m} a time, {d} and {d2} are activities. In a sentence that
recalls a fact, {?} is the answer.
"""

from __future__ import annotations


def _words(text: str, separator: str | None = None) -> tuple[str, ...]:
    return tuple(text.split(separator))


PEOPLE = _words(
    "Ada Ben Clara Dan Ella Finn Grace Hugo Iris Jack Kate Leo Mia Noah Olga Paul Rosa Sam Tess Uma Vera Will Yara Zoe "
    "Alma Boris Cora David Emma Felix Gina Henry Ivy Jonas Lara Marco Nina Oscar Petra Ralph Sara Tom Viola Walter "
    "Bella Carl Dora Erik Flora Gus Hanna Igor June Kurt Lily Max Nora Otto Ruth Simon Tina Victor Wanda Yuri"
)
PETS = _words(
    "Rex Spot Luna Misty Biscuit Pepper Shadow Ginger Bingo Coco Daisy Fluffy Muffin Nugget Patch Rusty Sunny Tiger "
    "Whiskers Ziggy Bubbles Cookie Domino Pickle"
)
KINDS = _words("dog cat rabbit hamster parrot turtle pony goat duck mouse hen frog fox lizard")
COLOURS = _words("red blue green yellow purple pink brown black white grey golden silver")
THINGS = _words(
    "ball kite drum book hat scarf boat car train doll robot puzzle lamp cup bowl spoon bag basket box brush pencil "
    "ribbon shoe boot coat glove ring coin key map flute violin bell candle mirror clock vase plate jar bottle rope "
    "hammer shovel bucket ladder wheel flag balloon puppet mask crown sword shield whistle marble button shell feather "
    "blanket pillow lantern telescope wagon"
)
SPOTS = _words(
    "under the bed;under the table;under the stairs;under the sofa;under the bench;behind the door;behind the curtain;"
    "behind the stove;behind the shed;behind the piano;in the cupboard;in the drawer;in the attic;in the cellar;"
    "in the garage;in the chest;in the oven;in the bath;on the shelf;on the roof;on the desk;on the windowsill;"
    "on the chair;on the porch;near the fountain;near the gate;near the well;near the oak;near the fireplace;"
    "near the pond",
    ";",
)
FOODS = _words(
    "soup bread cheese rice pasta cake honey porridge pancakes carrots apples pears plums cherries peas beans nuts "
    "grapes potatoes salad jam pudding dumplings noodles"
)
TOWN = _words(
    "park market harbour library school station museum beach bakery garden farm castle bridge mill church square "
    "theatre lake meadow hill"
)
WEATHER = _words("sunny rainy windy cold warm foggy snowy quiet bright cloudy stormy")
TIMES = _words("morning afternoon evening day weekend holiday")
DOINGS = _words(
    "sang a song;told a joke;danced around;played a game;counted the clouds;watched the birds;drew a picture;"
    "built a tower;planted some seeds;climbed a tree;ran a race;baked some biscuits;swept the floor;read a long tale;"
    "threw some pebbles;took a nap;looked at the stars;picked some flowers;fed the fish;chased a butterfly;"
    "made a loud noise;washed the dishes;waited for the bus;talked about the moon",
    ";",
)

OPENINGS = (
    "One {w} {m}, {people} met at the {t}.",
    "It was a {w} {m} at the {t}. {people} were there.",
    "Once upon a time there were some friends: {people}.",
    "{people} lived in a small house near the {t}.",
    "On a {w} {m} {people} walked to the {t}.",
    "This is the story of {people}, who spent a {w} {m} at the {t}.",
)
HAS = (
    "{a} had a {c} {x}.",
    "{a} was very proud of a {c} {x}.",
    "There was a {c} {x} in the hands of {a}.",
    "{a} came with a {c} {x}.",
    "A {c} {x} belonged to {a}.",
    "From a trip {a} had brought home a {c} {x}.",
)
PET = (
    "{a} had a {k} called {n}.",
    "With {a} came {n}, a small {k}.",
    "{n} was the {k} of {a}.",
    "{a} always took care of a {k} whose name was {n}.",
)
FOOD = (
    "{a} liked {f} more than anything else.",
    "The best food in the world for {a} was {f}.",
    "If there was {f} at home, {a} was happy.",
    "{a} could eat {f} all day long.",
)
PUT = (
    "{a} put the {x} {p}.",
    "To keep the {x} safe, {a} left it {p}.",
    "{a} hid the {x} {p}.",
    "Then the {x} was laid {p} by {a}.",
)
GIVE = (
    "{a} gave the {x} to {b}.",
    "{b} asked for the {x}, and {a} said yes.",
    "{a} was kind and let {b} have the {x}.",
    "{b} got the {x} from {a}.",
)
FILLER = (
    "{a} {d}.",
    "{a} and {b} {d}.",
    "After a while {a} {d}.",
    "Then {a} {d}, and {b} {d2}.",
    "{a} {d} near the {t}.",
    "It was {w}, so {a} {d}.",
    "While {a} {d}, {b} {d2}.",
    "Nobody saw how {a} {d}.",
    "A bell rang at the {t}.",
    "The {m} was {w}, and {b} {d}.",
)
ASK_COLOUR = (
    "What colour was the {x}? It was {?}.",
    "{b} dreamed of the {x} that night, and in the dream it was {?}, just as it really was.",
    '{b} asked {a} about the {x}. "It is {?}," said {a}.',
    "{a} painted a picture of the {x} and needed a lot of {?} paint.",
)
ASK_OWNER = (
    "Who had the {x} now? It was {?}.",
    '"Where is the {x}?" asked somebody. "Go and ask {?}," was the answer.',
    "When it was time to play with the {x}, everybody looked at {?}.",
)
ASK_SPOT = (
    "Later somebody needed the {x} and found it {?}.",
    "Where was the {x}? It was {?}.",
    "In the evening the {x} was still {?}.",
)
ASK_PET = (
    '{a} whistled for the {k} and called: "Come here, {?}!"',
    "What was the {k} called? Its name was {?}.",
    "The {k} was hungry, so {b} fed {?}.",
)
ASK_FOOD = (
    "{a} was hungry and ate a big plate of {?}.",
    "For dinner {b} cooked something for {a}, and of course it was {?}.",
    "What did {a} wish for? A lot of {?}.",
)
ENDINGS = (
    "Then they all went home.",
    "It had been a good {m}.",
    "And so the {m} ended.",
    "They were tired but happy.",
    "That night everybody slept well.",
    "Soon it was dark at the {t}.",
)
