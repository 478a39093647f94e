"""The Ray cluster that this process trains on: found, or started here for other machines to join."""

import atexit
import contextlib
import logging
import os
import subprocess
import time
from collections.abc import Callable
from typing import Any

from plaudit.cluster.nodes import Node, describe_need, describe_nodes, processes_per_node, suffices
from plaudit.cluster.ray_node import PORT, node_command, own_address, prepare_token, token_source, use_token
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
    address = recipe.cluster.address
    try:
        connect_to(address)
    except NoCluster:
        if address != "auto" or "RAY_ADDRESS" in os.environ:
            raise
        connect_to(_start_head(recipe.cluster.nodes))


class NoCluster(PlauditError):
    """Nothing answers at the address."""


def connect_to(address: str) -> None:
    use_token()
    ray = import_ray()
    if ray.is_initialized():
        return
    if address.startswith("ray://"):
        raise PlauditError(f"cluster.address is {address}, Ray's client: give the cluster's own address, such as HOST:{PORT}")
    from ray.exceptions import RayError

    # What happens to its processes is reported by us, in a line.
    ray._private.worker.print_to_stdstream = lambda *_, **__: None
    where = f"RAY_ADDRESS={os.environ['RAY_ADDRESS']}" if address == "auto" and "RAY_ADDRESS" in os.environ else address
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except ConnectionError as error:
        raise NoCluster(f"no Ray cluster answers at {where} ({_first_line(error)}). Start one: plaudit cluster up") from None
    except (RuntimeError, ValueError, RayError) as error:
        raise PlauditError(
            f"cannot join the Ray cluster at {where}: {_first_line(error)} All of its machines need the same token (here: "
            f"{token_source() or 'none'}) and the same versions of Ray and Python."
        ) from None


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _start_head(nodes: int) -> str:
    """A cluster that lives as long as this process."""
    source = prepare_token()
    address = own_address()
    process = subprocess.Popen(node_command(head=address, tied=True), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(_end, process)
    assert process.stdout is not None
    output: list[str] = []
    for line in process.stdout:
        output.append(line)
        if "Ray runtime started" in line:
            break
    else:
        raise PlauditError(f"Ray could not be started here: {''.join(output[-5:]).strip()}")
    process.stdout.close()
    print_line(
        f"There is no Ray cluster here yet: started one at {address}. On each of {nodes - 1} other machine(s) run\n"
        f"    plaudit cluster up --join {address}\n"
        f"with this cluster's token ({source}) in ~/.ray/auth_token there."
    )
    return address


def _end(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(OSError):
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
        if suffices(nodes, count, per_node):
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
