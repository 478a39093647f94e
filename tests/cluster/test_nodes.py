"""Which machine gets which ranks, what they are given there, and what is said when there are too few. Needs no Ray."""

import json
import os
import socket
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from plaudit.cluster import ray_node
from plaudit.cluster.nodes import (
    RAY_JOB,
    Node,
    assign_ranks,
    describe_need,
    describe_nodes,
    interface_of,
    processes_per_node,
    rank_environment,
    require_lasting_folder,
    suffices,
)
from plaudit.cluster.ray_connection import connect_to, import_ray, wait_for_nodes
from plaudit.cluster.watch import Watch
from plaudit.errors import PlauditError, ProcessFailed, RecipeError
from support.rank_jobs import recipe

FOUR = [Node("d", "10.0.0.10", 8, 8), Node("b", "10.0.0.9", 8, 3), Node("a", "10.0.0.9", 8, 8), Node("c", "10.0.0.2", 8, 8)]


def test_ranks_are_ordered_by_machine_and_the_command_s_machine_comes_first():
    places = assign_ranks(FOUR, 2, first="b")
    assert [(place.ranks.rank, place.node.id, place.ranks.local_rank) for place in places] == [
        (0, "b", 0), (1, "b", 1), (2, "c", 0), (3, "c", 1), (4, "a", 0), (5, "a", 1), (6, "d", 0), (7, "d", 1),
    ]  # fmt: skip
    assert {(place.ranks.size, place.ranks.local_size, place.ranks.address) for place in places} == {(8, 2, "10.0.0.9")}


def test_a_command_elsewhere_lets_addresses_decide():
    assert [place.node.id for place in assign_ranks(FOUR, 1, first="elsewhere")] == ["c", "a", "b", "d"]
    mixed = [Node("x", "fe80::1", 8, 8), *FOUR]
    assert [place.node.id for place in assign_ranks(mixed, 1, first="elsewhere")] == ["c", "a", "b", "d", "x"]


def test_all_gpus_of_machines_with_equal_numbers():
    assert processes_per_node(recipe(gpus="all", nodes=2), FOUR, "GPU") == 8
    assert processes_per_node(recipe(gpus="all", nodes=2), FOUR, "CPU") == 1
    assert processes_per_node(recipe(gpus=3, nodes=2), FOUR, "GPU") == 3
    with pytest.raises(RecipeError, match=r"all, but machines have different numbers. Give one: 10.0.0.1: 4 GPUs \(4 free\)"):
        processes_per_node(recipe(gpus="all", nodes=2), [Node("x", "10.0.0.1", 4, 4), *FOUR], "GPU")


def test_free_machines_are_counted():
    assert suffices(FOUR, 3, 8)
    assert not suffices(FOUR, 4, 8)
    assert suffices(FOUR, 4, 3)


def test_descriptions():
    assert describe_need(2, 8, "GPU") == "2 machines with 8 GPUs free each"
    assert describe_nodes([FOUR[1], Node("x", "10.0.0.3", 1, 0)], "GPU") == "10.0.0.9: 8 GPUs (3 free), 10.0.0.3: 1 GPU (0 free)"
    assert describe_nodes([], "GPU") == "no machines"


def test_missing_machines_are_waited_for_and_then_named(monkeypatch, capsys):
    found, now = [[FOUR[1]], FOUR[:1], FOUR[:3]], [0.0]

    def nodes(resource: str) -> list[Node]:
        return found.pop(0) if len(found) > 1 else found[0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr("plaudit.cluster.ray_connection.live_nodes", nodes)
    monkeypatch.setattr("plaudit.cluster.ray_connection.answers", lambda node: True)
    assert wait_for_nodes(recipe(gpus=8, nodes=2), sleep, lambda: now[0]) == ("CPU", 8)
    assert now[0] == 2.0
    assert "waiting for 2 machines with 8 CPUs free each; the Ray cluster has 10.0.0.9: 8 CPUs (3 free)" in capsys.readouterr().err
    with pytest.raises(PlauditError) as raised:
        wait_for_nodes(recipe(gpus=8, nodes=3, timeout_s=60), sleep, lambda: now[0])
    assert not isinstance(raised.value, ProcessFailed), "a restart would not help"
    assert str(raised.value).startswith(
        "training needs 3 machines with 8 CPUs free each (cluster.nodes, cluster.gpus), and after 60 s (cluster.timeout_s) the Ray "
        "cluster has 10.0.0.10: 8 CPUs (8 free), 10.0.0.9: 8 CPUs (3 free), 10.0.0.9: 8 CPUs (8 free). Add machines with"
    )


def test_a_machine_that_is_gone_does_not_count_before_ray_notices(monkeypatch):
    monkeypatch.setattr("plaudit.cluster.ray_connection.live_nodes", lambda resource: FOUR)
    monkeypatch.setattr("plaudit.cluster.ray_connection.answers", lambda node: node.id == "a")
    with pytest.raises(PlauditError, match="training needs 2 machines with 8 CPUs free each"):
        wait_for_nodes(recipe(gpus=8, nodes=2, timeout_s=1), lambda seconds: None, iter(range(9)).__next__)


def test_a_rank_gets_the_command_s_variables_but_not_its_machine_s():
    there = {"PATH": "/there", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "3", "RANK": "0", "RAY_JOB_ID": "1", "SITE": "b"}
    command = {
        "PATH": "/here",
        "MY_KEY": "x",
        "CUDA_VISIBLE_DEVICES": "",
        "RAY_ADDRESS": "h",
        "SLURM_PROCID": "0",
        "RANK": "7",
        "RANKING": "r",
    }
    assert rank_environment(there, command, "eth1", "10.0.0.1") == {
        "PATH": "/here", "MY_KEY": "x", "RANKING": "r", "CUDA_VISIBLE_DEVICES": "3", "RAY_JOB_ID": "1", "SITE": "b",
        "GLOO_SOCKET_IFNAME": "eth1", "NCCL_SOCKET_IFNAME": "=eth1", "MASTER_ADDR": "10.0.0.1",
    }  # fmt: skip


def test_networks_and_threads_that_the_user_has_chosen_are_kept():
    chosen = {"GLOO_SOCKET_IFNAME": "ib0", "OMP_NUM_THREADS": "1"}
    assert rank_environment({}, chosen, "eth1", "h") == {**chosen, "NCCL_SOCKET_IFNAME": "=eth1", "MASTER_ADDR": "h"}
    assert "OMP_NUM_THREADS" not in rank_environment({}, {**chosen, RAY_JOB: "{}"}, None, "h"), "Ray sets 1 in its jobs"


def test_the_interface_of_an_address():
    assert interface_of("127.0.0.1") in ("lo", "lo0")
    assert interface_of("203.0.113.1") is None


def test_the_message_for_a_lost_machine():
    watch = Watch(2, 60.0, culprit_s=0.0)
    watch.heard(1, {"doing": "step 3, sampling", "waiting": False})
    watch.ended(1, -9, lost="the machine 10.0.0.2 (Ray node 0a1b2c3d) is gone, or its Ray processes are")
    watch.ended(0, 1)
    verdict = watch.verdict()
    assert verdict is not None
    assert isinstance(verdict.error, ProcessFailed)
    assert str(verdict.error) == (
        "rank 1 (step 3, sampling) was lost: the machine 10.0.0.2 (Ray node 0a1b2c3d) is gone, or its Ray processes are."
    )


# Ray jobs, tokens and programs ----------------------------------------------------------------------------------------


def test_the_run_folder_of_a_job_must_last(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    job = {RAY_JOB: json.dumps({"runtime_env": {"working_dir": "gcs://_ray_pkg_1.zip"}})}
    with pytest.raises(RecipeError, match=r"run\.dir is r, within the copy of --working-dir .* run\.dir=/shared/r$"):
        require_lasting_folder(recipe(), job)
    require_lasting_folder(recipe(), {})
    require_lasting_folder(recipe(), {RAY_JOB: json.dumps({"runtime_env": {}})})
    lasting = recipe().model_copy(update={"run": recipe().run.model_copy(update={"dir": "/shared/r"})})
    require_lasting_folder(lasting, job)


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_a_token_is_made_once_and_nobody_else_can_read_it(home):
    assert ray_node.token_source() is None
    assert ray_node.prepare_token() == ray_node.token_source() == "~/.ray/auth_token"
    file = home / ".ray/auth_token"
    token = file.read_text()
    assert len(token) == 64
    assert file.stat().st_mode & 0o777 == 0o600
    ray_node.prepare_token()
    assert file.read_text() == token


def test_a_token_is_used_unless_the_user_has_switched_that_off(home, monkeypatch):
    ray_node.use_token()
    assert "RAY_AUTH_MODE" not in os.environ
    monkeypatch.setenv("RAY_AUTH_TOKEN", "x")
    ray_node.use_token()
    assert os.environ["RAY_AUTH_MODE"] == "token"
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    ray_node.use_token()
    assert os.environ["RAY_AUTH_MODE"] == "disabled"


def test_joining_without_a_token_says_where_it_is(home, plaudit, monkeypatch):
    monkeypatch.setattr("plaudit.cluster.ray_connection.import_ray", lambda: None)
    code, _, err = plaudit("cluster", "up", "--join", "10.0.0.1:6379")
    assert code == 2
    assert err == (
        "~/.ray/auth_token is missing: the cluster accepts only machines with its token. Copy it from where the cluster was "
        "started: scp 10.0.0.1:.ray/auth_token ~/.ray/auth_token\n"
    )


def test_without_ray(monkeypatch, plaudit):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(PlauditError, match="need Ray, which is not installed; install it on all of them with: pip"):
        import_ray()
    assert plaudit("cluster", "up")[0] == 2


def test_ray_s_client_is_refused(monkeypatch):
    monkeypatch.setattr("plaudit.cluster.ray_connection.import_ray", lambda: type("Ray", (), {"is_initialized": lambda: False}))
    with pytest.raises(
        PlauditError, match="ray://h:10001 is the address of Ray's client or dashboard: give the cluster's own, such as HOST:6379"
    ):
        connect_to("ray://h:10001")


def test_an_address_is_waited_for_and_resolved():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        # A machine's own name may lead to its loopback address, at which Ray's other machines do not know it.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ray_node, "free_address", lambda: "10.0.0.7:1")
            assert ray_node.wait_for_address(f"localhost:{port}", 0.0) == f"10.0.0.7:{port}"
    with pytest.raises(ray_node.NoCluster, match=rf"no Ray cluster answers at 127\.0\.0\.1:{port} \(.+\)\. Start one there with"):
        ray_node.wait_for_address(f"127.0.0.1:{port}", 0.0)
    with pytest.raises(PlauditError, match="node1 should be HOST:PORT, as `plaudit cluster up` prints it"):
        ray_node.wait_for_address("node1", 0.0)


def test_only_nodes_that_the_user_has_started_are_found(monkeypatch):
    """Not those that end with a command, nor another user's, nor other programs."""
    ours, user = [sys.executable, *ray_node.PROGRAM], SimpleNamespace(real=os.getuid())
    found = [
        (1, [*ours, "--head"], user),
        (2, [*ours, ray_node.TIED, "--head"], user),
        (3, [*ours, "--head"], SimpleNamespace(real=os.getuid() + 1)),
        (4, ["raylet", "plaudit.cluster.ray_node"], user),
        (5, None, None),
        (6, ray_node.node_command(join="10.0.0.1:6379"), user),
    ]
    processes = [SimpleNamespace(pid=pid, info={"cmdline": command, "uids": uids}) for pid, command, uids in found]
    monkeypatch.setattr("psutil.process_iter", lambda names: processes)
    assert ray_node.running_nodes() == [1, 6]


def test_nothing_to_stop(plaudit, monkeypatch):
    monkeypatch.setattr(ray_node, "running_nodes", list)
    assert plaudit("cluster", "down") == (0, "", "plaudit has started no Ray node on this machine\n")
