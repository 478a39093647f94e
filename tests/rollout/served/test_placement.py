"""Which GPUs a server uses, and which servers a process samples with."""

import pytest
import torch

from plaudit.errors import RecipeError
from plaudit.recipe.rollout import EngineServerSettings
from plaudit.rollout.served.placement import server_gpus, share_urls
from plaudit.world import World


def gpus_of(rank: int, size: int, visible: str = "", **settings) -> str | None:
    world = World(rank, size, torch.device("cuda", rank % 8))
    return server_gpus(EngineServerSettings(**settings), world, {"CUDA_VISIBLE_DEVICES": visible}).get("CUDA_VISIBLE_DEVICES")


@pytest.mark.parametrize(
    ("rank", "size", "settings", "gpus"),
    [
        (0, 1, {}, "0"),
        (2, 4, {}, "2"),
        (2, 4, {"visible": "4,5,6,7"}, "6"),
        (0, 1, {"tensor_parallel": 2}, None),
        (0, 1, {"gpus": [1]}, "1"),
        (1, 2, {"gpus": [2, 3]}, "3"),
        (1, 2, {"gpus": [2, 3, 6, 7], "tensor_parallel": 2}, "6,7"),
        (1, 2, {"gpus": [2, 3], "visible": "a,b,c,d"}, "d"),
        (5, 8, {"gpus": [4, 5, 6, 7]}, "5"),
    ],
)
def test_the_gpus_of_a_processs_server(rank, size, settings, gpus):
    if (rank, size) == (5, 8):  # two machines of four processes; the device is rank 1's of its machine
        world = World(rank, size, torch.device("cuda", 1), local_size=4)
        assert server_gpus(EngineServerSettings(**settings), world, {}) == {"CUDA_VISIBLE_DEVICES": gpus}
    else:
        assert gpus_of(rank, size, **settings) == gpus


@pytest.mark.parametrize(
    ("rank", "size", "settings", "message"),
    [
        (0, 2, {"tensor_parallel": 2}, "set rollout.server.gpus to GPUs that are the servers' alone"),
        (0, 3, {"gpus": [4, 5]}, "enough for 2 servers on each machine, and 3 processes"),
        (3, 4, {"gpus": [4, 5]}, "enough for 2 servers on each machine, and 4 processes"),
        (1, 2, {"gpus": [2, 1]}, "GPU 1 is the trainer's"),
        (0, 1, {"gpus": [3], "visible": "0,1"}, "there is no GPU 3: CUDA_VISIBLE_DEVICES has 2 GPUs"),
    ],
)
def test_gpus_that_cannot_be_used(rank, size, settings, message):
    with pytest.raises(RecipeError, match=message):
        gpus_of(rank, size, **settings)


@pytest.mark.parametrize(
    ("size", "urls", "shares"),
    [
        (1, "ab", ["ab"]),
        (2, "abcd", ["ac", "bd"]),
        (2, "ab", ["a", "b"]),
        (2, "a", ["a", "a"]),
        (4, "ab", ["a", "b", "a", "b"]),
    ],
)
def test_servers_are_divided_among_processes_or_shared(size, urls, shares):
    assert ["".join(share_urls(urls, World(rank, size, torch.device("cpu")))) for rank in range(size)] == shares


def test_servers_that_cannot_be_divided_evenly():
    with pytest.raises(RecipeError, match="3 servers for 2 processes"):
        share_urls("abc", World(0, 2, torch.device("cpu")))
