"""How the kernel of cached latents is launched on a GPU: its tiles, and the parts into which a text is cut.

The kernel should take as long as reading the cache. Enough loads must be under way at any time, on all of the GPU's
multiprocessors, and the arithmetic must keep up with them.
"""

from __future__ import annotations

from typing import NamedTuple


class Device(NamedTuple):
    """What decides the launch on a GPU: its generation, its size, and the shared memory that one program can have."""

    major: int
    multiprocessors: int
    shared_bytes: int


class Launch(NamedTuple):
    """Tokens in a tile, warps, Triton's stages (tiles that are being loaded or used), and the layout of products.

    Hopper's matrix unit reads its operands from shared memory itself, but takes no fewer than 64 rows. A `turned`
    product gives it tokens or columns as rows and heads as columns. Otherwise heads are the rows, and 16 are enough.
    """

    tile: int
    warps: int
    stages: int
    turned: bool


# In order of preference: the first whose tiles fit into shared memory is taken. Hopper's were the fastest of eight on
# an H200, over six sizes of batch and context: the first two for widths up to 512 + 32, the third for 768 + 32.
_LAUNCHES_ON_HOPPER = (
    Launch(64, 4, 4, True),
    Launch(64, 4, 3, True),
    Launch(32, 4, 3, False),
    Launch(16, 8, 3, False),
    Launch(16, 8, 2, False),
)
_LAUNCHES = (Launch(32, 8, 4, False), Launch(32, 8, 3, False), Launch(16, 8, 3, False), Launch(16, 8, 2, False))
# Heads of one program: the matrix unit's smallest number of rows. More heads are further programs.
HEADS_AT_ONCE = 16
# A part of fewer tiles takes longer to start and to join than it saves.
_FEWEST_TILES = 4


def launch_options(r: int, p: int, batch: int, tokens: int, device: Device) -> tuple[Launch, int]:
    """Return how to launch the kernel for a cache of these widths, and in how many parts to cut each text.

    The kernel cuts a text into fewer parts where the last ones would be empty.
    """
    launch = choose_launch(r, p, device)
    # A multiprocessor has registers for about 12 warps of this kernel, and keeps 1 KB of shared memory per program.
    by_memory = (device.shared_bytes + 1024) // (shared_bytes(launch, r, p) + 1024)
    at_a_time = device.multiprocessors * min(by_memory, 12 // launch.warps)
    return launch, max(1, min(_parts_that_fill(at_a_time, batch), tokens // (launch.tile * _FEWEST_TILES)))


def choose_launch(r: int, p: int, device: Device) -> Launch:
    """Return the preferred launch for a cache of these widths; one that needs too much shared memory if none fits."""
    for launch in _LAUNCHES_ON_HOPPER if device.major == 9 else _LAUNCHES:
        if shared_bytes(launch, r, p) <= device.shared_bytes:
            break
    return launch


def shared_bytes(launch: Launch, r: int, p: int) -> int:
    """Return the shared memory of one program: tiles, queries and a tile's weights."""
    columns = sum(padded_columns(r, p))
    # A tile that the matrix unit itself reads from shared memory is in use while the others are being loaded.
    tiles = launch.stages if launch.turned and launch.tile >= 64 else launch.stages - 1
    return 2 * (tiles * launch.tile * columns + HEADS_AT_ONCE * columns + HEADS_AT_ONCE * launch.tile)


def _parts_that_fill(programs_at_a_time: int, batch: int) -> int:
    """Return in how many parts to cut each text so that the last programs leave little of the GPU idle."""
    best, best_share = 1, 0.0
    fewest_rounds = -(-batch // programs_at_a_time)
    for rounds in range(fewest_rounds, fewest_rounds + 4):
        parts = rounds * programs_at_a_time // batch
        share = parts * batch / (rounds * programs_at_a_time)
        # A little less idle time is not worth more parts.
        if share > best_share + 0.05:
            best, best_share = parts, share
    return best


def padded_columns(r: int, p: int) -> tuple[int, int, int]:
    """Return the latent's columns as two powers of two, so that 768 are not padded to 1,024, and the channel's."""
    wide = max(16, 1 << (r.bit_length() - 1))
    rest = max(16, 1 << (r - wide - 1).bit_length()) if r > wide else 0
    return wide, rest, max(16, 1 << (p - 1).bit_length()) if p else 0
