"""The Ray cluster that this process trains on: found, or started here for other machines to join."""

import atexit
import contextlib
import logging
import os
import subprocess
import time
from collections.abc import Callable
from typing import Any

from plaudit.cluster.nodes import CONNECT_S, Node, answers, describe_need, describe_nodes, processes_per_node, suffices
from plaudit.cluster.ray_node import (
    PORT,
    NoCluster,
    free_address,
    node_command,
    prepare_token,
    start_node,
    token_source,
    use_token,
    wait_for_address,
)
from plaudit.errors import PlauditError, install_extra
from plaudit.recipe import TrainingRecipe
from plaudit.report.progress import print_line

LOOK_EVERY_S = 1.0
REPORT_EVERY_S = 30.0


def import_ray() -> Any:
    try:
        import ray
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise PlauditError(
            f"several machines need Ray, which is not installed; install it on all of them with: {install_extra('cluster')}"
        ) from None
    return ray


def connect(recipe: TrainingRecipe) -> None:
    """Join the cluster of `cluster.address`, once per process; if that is auto and there is none, start one."""
    use_token()
    address = recipe.cluster.address
    if address == "auto" and not import_ray().is_initialized():
        address = _known_cluster() or _start_head(recipe.cluster.nodes)
    connect_to(address, recipe.cluster.timeout_s)


def connect_to(address: str, within_s: float = CONNECT_S) -> None:
    """`within_s`: how long it is waited for."""
    use_token()
    ray = import_ray()
    if ray.is_initialized():
        return
    if address == "auto":
        if (known := _known_cluster()) is None:
            raise NoCluster("there is no Ray cluster on this machine, and RAY_ADDRESS is not set. Start one: plaudit cluster up")
        address = known
    if "://" in address:
        raise PlauditError(f"{address} is the address of Ray's client or dashboard: give the cluster's own, such as HOST:{PORT}")
    address = wait_for_address(address, within_s)

    from ray.exceptions import RayError

    # What happens to its processes is reported by us, in a line.
    ray._private.worker.print_to_stdstream = lambda *_, **__: None
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError, RayError) as error:
        cause = str(error).strip().partition("\n")[0].removesuffix(".")
        raise PlauditError(
            f"cannot join the Ray cluster at {address}: {cause}. All of its machines need the same token (here: "
            f"{token_source() or 'none'}) and the same versions of Ray and Python."
        ) from None


def _known_cluster() -> str | None:
    """The address in RAY_ADDRESS, or that of the cluster that this machine belongs to."""
    if (given := os.environ.get("RAY_ADDRESS", "auto")) != "auto":
        return given
    from ray._private import utils

    with contextlib.suppress(FileNotFoundError):
        if os.stat(utils.get_ray_address_file(None)).st_uid != os.getuid():  # pyright: ignore[reportPrivateImportUsage]
            return None  # another user's cluster, which must not get our token
    address = utils.read_ray_address()
    with contextlib.suppress(NoCluster):
        return address and wait_for_address(address, 0.0)
    return None  # a cluster that was killed


def _start_head(nodes: int) -> str:
    """A cluster that lives as long as this process."""
    source = prepare_token()
    use_token()
    _reread_environment()
    address = free_address()
    process = start_node(node_command(head=address, tied=True), stdin=subprocess.PIPE)
    atexit.register(_end, process)
    print_line(
        f"There is no Ray cluster on this machine: started one at {address}, which ends with this command. On each of "
        f"{nodes - 1} other machine(s), with its token ({source}):\n    plaudit cluster up --join {address}"
    )
    return address


def _reread_environment() -> None:
    """Ray reads whether it uses a token when it is imported, which was before the token existed."""
    from ray._raylet import Config  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]

    Config.initialize("")


def _end(process: "subprocess.Popen[bytes]") -> None:
    import_ray().shutdown()
    assert process.stdin is not None
    process.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(30)


# Machines ------------------------------------------------------------------------------------------------------------


def resource_of(recipe: TrainingRecipe) -> str:
    """What a rank takes one of: a GPU, or on machines without any a CPU."""
    if recipe.run.device == "cpu":
        return "CPU"
    return "GPU" if recipe.run.device == "cuda" or import_ray().cluster_resources().get("GPU") else "CPU"


def live_nodes(resource: str) -> list[Node]:
    import ray
    from ray._private.state import available_resources_per_node

    free = available_resources_per_node()
    found = [
        Node(
            node["NodeID"],
            node["NodeManagerAddress"],
            int(node["Resources"].get(resource, 0)),
            int(free.get(node["NodeID"], {}).get(resource, 0)),
            node["NodeManagerPort"],
        )
        for node in ray.nodes()
        if node["Alive"]
    ]
    return sorted(found, key=lambda node: (node.address, node.id))


def wait_for_nodes(
    recipe: TrainingRecipe, sleep: Callable[[float], None] = time.sleep, clock: Callable[[], float] = time.monotonic
) -> tuple[str, int]:
    """Until enough machines are free; returns which resource a rank takes, and how many ranks a machine has."""
    count, deadline, reported = recipe.cluster.nodes, clock() + recipe.cluster.timeout_s, None
    while True:
        resource = resource_of(recipe)
        nodes = live_nodes(resource)
        per_node = processes_per_node(recipe, nodes, resource)
        if suffices(nodes, count, per_node) and suffices(filter(answers, nodes), count, per_node):
            return resource, per_node
        need, has = describe_need(count, per_node, resource), describe_nodes(nodes, resource)
        if clock() > deadline:
            raise PlauditError(
                f"training needs {need} (cluster.nodes, cluster.gpus), and after {recipe.cluster.timeout_s:g} s "
                f"(cluster.timeout_s) the Ray cluster has {has}. Add machines with `plaudit cluster up --join …`, or end what uses "
                "them (`ray job list`, `ray list actors`), then start the run again."
            )
        if reported is None or clock() - reported > REPORT_EVERY_S:
            print_line(f"waiting for {need}; the Ray cluster has {has}")
            reported = clock()
        sleep(LOOK_EVERY_S)
