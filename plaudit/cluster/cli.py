"""`plaudit cluster up | status | down`: this machine in a Ray cluster."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from plaudit.command_help import examples
from plaudit.errors import PlauditError

STOP_S = 60.0

cluster = typer.Typer(help="Several machines: start, show and stop this machine's part of a Ray cluster.", no_args_is_help=True)


@cluster.command("up", epilog=examples("cluster up"))
def up(
    join: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="The cluster to join. Default: start one here.", show_default=False)
    ] = None,
    port: Annotated[int, typer.Option(min=1024, max=65535, help="Where a cluster that starts here listens.")] = 6379,
    cpus: Annotated[int | None, typer.Option(min=0, help="CPUs to offer. Default: all.", show_default=False)] = None,
    gpus: Annotated[int | None, typer.Option(min=0, help="GPUs to offer. Default: all.", show_default=False)] = None,
    temp_dir: Annotated[
        Path | None, typer.Option(help="Folder for Ray's sockets and logs. Default: /tmp/ray.", show_default=False)
    ] = None,
    wait: Annotated[float, typer.Option(min=0.0, metavar="SECONDS", help="How long to wait for the cluster to join.")] = 60.0,
    block: Annotated[bool, typer.Option("--block", help="Stay in the foreground until stopped, as SLURM's tasks do.")] = False,
) -> None:
    """Start a Ray cluster on this machine, or let this machine join one."""
    from plaudit.cluster.ray_connection import import_ray
    from plaudit.cluster.ray_node import (
        TOKEN_FILE,
        free_address,
        node_command,
        prepare_token,
        start_node,
        token_source,
        wait_for_address,
    )

    import_ray()
    if join is not None and token_source() is None:
        raise PlauditError(
            f"{TOKEN_FILE} is missing: the cluster accepts only machines with its token. Copy it from where the cluster was "
            f"started: scp {join.rpartition(':')[0]}:.ray/auth_token ~/.ray/auth_token"
        )
    source = prepare_token()
    join = join and wait_for_address(join, wait)
    address = join or free_address(port)
    command = node_command(head=None if join else address, join=join, cpus=cpus, gpus=gpus, temp_dir=temp_dir)
    if block:
        print(_explain(address, source, is_head=join is None), flush=True)
        os.execv(command[0], command)
    start_node(command)
    print(_explain(address, source, is_head=join is None))


def _explain(address: str, source: str, *, is_head: bool) -> str:
    if not is_head:
        return f"This machine belongs to the Ray cluster at {address}. It leaves with: plaudit cluster down"
    return (
        f"The Ray cluster at {address} has this machine. On each of the others, unless they share a home folder, copy its token "
        f"({source}) first:\n"
        f"    scp {address.rpartition(':')[0]}:.ray/auth_token ~/.ray/auth_token\n"
        f"    plaudit cluster up --join {address}\n"
        "Then train, on any of them: plaudit rl R.yaml cluster.nodes=2\n"
        "Ray's own commands (ray job submit, ray status) need RAY_AUTH_MODE=token in the environment."
    )


@cluster.command("status", epilog=examples("cluster status"))
def status(
    address: Annotated[str, typer.Option(help="HOST:PORT; auto: RAY_ADDRESS, or this machine's cluster.")] = "auto",
) -> None:
    """Show the machines of a cluster and what is free."""
    from plaudit.cluster.nodes import describe_nodes
    from plaudit.cluster.ray_connection import connect_to, import_ray, live_nodes
    from plaudit.cluster.ray_node import running_nodes

    connect_to(address)
    cpus = live_nodes("CPU")
    gpus = {node.id: node for node in live_nodes("GPU")}
    for node in cpus:
        print(f"{describe_nodes([gpus[node.id]], 'GPU')}, {describe_nodes([node], 'CPU').partition(': ')[2]}")
    import_ray().shutdown()
    if here := len(running_nodes()):
        print(f"started on this machine by `plaudit cluster up`: {here}")


@cluster.command("down", epilog=examples("cluster down"))
def down() -> None:
    """Stop what `plaudit cluster up` has started on this machine; other Ray processes are left alone."""
    import psutil

    from plaudit.cluster.ray_node import running_nodes

    nodes = [psutil.Process(pid) for pid in running_nodes()]
    for node in nodes:
        node.terminate()
    _, late = psutil.wait_procs(nodes, STOP_S)
    for node in late:
        node.kill()
    psutil.wait_procs(late, STOP_S)
    print(f"stopped {len(nodes)} Ray node(s)" if nodes else "plaudit has started no Ray node on this machine", file=sys.stderr)
