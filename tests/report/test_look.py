"""The page, picture and figures of a look inside: complete, self-contained, escaped, and the same each time."""

import base64
import json
import re
from io import BytesIO
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.image import imread

from oelm.errors import FileError
from oelm.report.look import write_look
from oelm.report.maps import MapsFigure, draw_maps, resized
from oelm.runs.looks import Drift, HeadDifference, HeadDrift, HeadLook, LayerMap, Look, ModelLook, TextLook

MARKUP = "<script>alert('x')</script> & \x1b[31m"


def heads(count: int = 3, **changes) -> list[HeadLook]:
    fields = {
        "previous": 0.5,
        "itself": 0.25,
        "first": 0.125,
        "prefix_matching": None,
        "entropy": 0.75,
        "induction": 0.1,
    }
    fields |= {"effective_rank": 7.5, "rank": 8, "full_rank": 12} | changes
    return [HeadLook(kind="decoder", layer=layer, head=head, **fields) for layer in range(2) for head in range(count)]


def model_look(source: str = "model", texts: int = 1, **changes) -> ModelLook:
    text = TextLook(text=MARKUP, tokens=["<b>", " ", "c"], heads=heads(**changes))
    return ModelLook(
        source=source, model="", model_class="GPT", family="gpt2", heads=heads(**changes), texts=[text] * texts
    )


def maps(count: int = 3) -> list[LayerMap]:
    weights = np.tril(np.ones((count, 3, 3), np.float32))
    return [LayerMap("decoder", layer, weights / weights.sum(-1, keepdims=True)) for layer in range(2)]


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_page_has_every_figure_and_loads_nothing(language, tmp_path):
    files, problems = write_look(Look(models=[model_look()]), [[maps()]], tmp_path, language)
    assert files[:2] == [tmp_path / "look.json", tmp_path / "look.html"]
    assert (len(files) == 3) == (not problems)
    page = (tmp_path / "look.html").read_text(encoding="utf-8")
    for number in ("0.50", "0.25", "0.12", "0.75", "0.10", "7.5"):
        assert f">{number}<" in page
    assert MARKUP not in page
    assert "<script>alert" not in page
    assert "&lt;b&gt;" in page
    loaded = re.findall(r"""(?:src|href)=["']([^"']*)""", page)
    assert all(link.startswith(("#", "data:image/png;base64,")) for link in loaded)
    assert any(link.startswith("data:") for link in loaded)
    assert "\x1b" not in page
    again = tmp_path / "again"
    write_look(Look(models=[model_look()]), [[maps()]], again, language)
    assert all((again / file.name).read_bytes() == file.read_bytes() for file in files)


def test_the_json_holds_every_figure(tmp_path):
    write_look(Look(models=[model_look()]), [[maps()]], tmp_path)
    content = json.loads((tmp_path / "look.json").read_text(encoding="utf-8"))
    assert Look.model_validate(content).models == [model_look()]
    assert content["models"][0]["texts"][0]["text"] == MARKUP


def test_two_models_are_side_by_side_with_their_differences(tmp_path):
    changes = [
        HeadDifference(
            kind="decoder", layer=0, head=0, differences={"previous": -0.25, "entropy": 0.125}, distance=0.375
        )
    ]
    look = Look(models=[model_look("one"), model_look("two", previous=0.25)], differences=changes)
    write_look(look, [[maps()], [maps()]], tmp_path)
    page = (tmp_path / "look.html").read_text(encoding="utf-8")
    assert "How the two differ" in page
    for cell in ("−0.25", "+0.12", "0.38"):
        assert f">{cell}<" in page
    wide = imread(tmp_path / "look.png").shape[1]
    write_look(Look(models=[model_look("one")]), [[maps()]], tmp_path)
    assert imread(tmp_path / "look.png").shape[1] < wide


@pytest.mark.parametrize(
    ("differences", "sentence"),
    [
        ([], "no kind of attention in common"),
        ([HeadDifference(kind="decoder", layer=0, head=0, differences={}, distance=None)], "as different tokens"),
    ],
)
def test_what_cannot_be_compared_is_said(differences, sentence, tmp_path):
    look = Look(models=[model_look("one"), model_look("two")], differences=differences)
    write_look(look, [[maps()], [maps()]], tmp_path)
    assert sentence in (tmp_path / "look.html").read_text(encoding="utf-8")


def test_drift_is_drawn_for_each_layer_and_listed_for_each_head(tmp_path):
    drifted = [HeadDrift(kind="decoder", layer=layer, head=0, distances=[0.625, 0.0]) for layer in range(2)]
    write_look(Look(models=[model_look()], drift=Drift(steps=[10, 1000], heads=drifted)), [[maps()]], tmp_path)
    page = (tmp_path / "look.html").read_text(encoding="utf-8")
    assert "step 1,000" in page
    assert page.count(">0.62<") == 2
    assert 'id="figure-look-drift"' in page


def test_the_spread_over_texts_is_shown_where_there_are_several(tmp_path):
    spread = {"previous": 0.375, "itself": None}
    write_look(Look(models=[model_look(texts=2, spread=spread)]), [[maps(), maps()]], tmp_path)
    page = (tmp_path / "look.html").read_text(encoding="utf-8")
    assert page.count(">0.38<") == 6
    assert "over 2 texts" in page


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "look").write_text("")
    with pytest.raises(FileError, match="is a file; name a folder with --out"):
        write_look(Look(models=[model_look()]), [[maps()]], tmp_path / "look")


def test_a_map_is_enlarged_by_repeating_points_and_reduced_to_the_largest_weight():
    weights = np.array([[1, 0], [0.25, 0.75]], np.float32)
    assert resized(weights, 4).tolist() == np.kron(weights, np.ones((2, 2))).tolist()
    diagonal = np.eye(100, dtype=np.float32)
    assert resized(diagonal, 25).tolist() == np.eye(25).tolist()
    assert resized(np.eye(7, 10, dtype=np.float32), 3).shape == (3, 3)


def test_a_picture_has_a_place_for_every_head_with_its_weights():
    """The pixels in the SVG: a head whose weight is at a corner has its only full colour there."""
    weights = np.zeros((2, 4, 4), np.float32)
    weights[0, 0, 0] = weights[1, 3, 3] = 1
    maps_of_model = (LayerMap("encoder", 0, weights),)
    figure = MapsFigure("m", "", "", [], names=("n",), labels=(("layer 0",),), maps=(maps_of_model,))
    root = ElementTree.fromstring(draw_maps(figure).svg)
    (image,) = root.iter("{http://www.w3.org/2000/svg}image")
    encoded = image.get("{http://www.w3.org/1999/xlink}href").partition("base64,")[2]
    opacity = imread(BytesIO(base64.b64decode(encoded)))[..., 3]
    rows, columns = np.nonzero(opacity > 0.99)
    left = columns < opacity.shape[1] / 2
    assert rows[left].max() < opacity.shape[0] / 3
    assert rows[~left].min() > opacity.shape[0] / 2
    assert len(set(rows[left])) == len(set(columns[~left])) == opacity.shape[0] / 4


def test_models_of_many_heads_and_tokens_give_a_picture_of_bounded_size():
    generator = np.random.default_rng(0)
    weights = generator.random((16, 300, 200), np.float32)
    many = tuple(LayerMap("cross", layer, weights) for layer in range(6))
    labels = tuple(f"cross {layer}" for layer in range(6))
    drawn = draw_maps(MapsFigure("m", "", "", [], names=("n" * 200,), labels=(labels,), maps=(many,)), png=True)
    assert imread(BytesIO(drawn.png)).size < 30_000_000
    assert len(drawn.svg) < 20_000_000
