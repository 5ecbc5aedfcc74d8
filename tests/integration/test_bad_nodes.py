"""Settings of several machines that cannot be meant: refused before anything starts on any of them."""

from pathlib import Path

import pytest

from tests.programs.users import JobFile, refusal

pytestmark = pytest.mark.usefixtures("home")

OVER_NODES = {"launcher": "torchrun", "devices": 2, "memory_limit": "2GiB"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hosts": ["here", "b; rm -rf /"]}, "hosts[1]: 'b; rm -rf /' is no name or address of a host"),
        ({"hosts": ["here", "$(id)"]}, "hosts[1]: '$(id)' is no name or address of a host"),
        (
            {"hosts": ["here", "-oProxyCommand=id"]},
            "hosts[1]: '-oProxyCommand=id' is no name or address of a host",
        ),
        ({"hosts": ["here", "b", "b"]}, "names b twice; name each host once"),
        ({"hosts": ["here", "b"], "nodes": 3}, "has 2 hosts, and nodes: 3; remove one of the two"),
        ({"nodes": 2, "devices": 3}, "hardware.devices: 3 ranks cannot be equal on 2 nodes; give a multiple of 2"),
        ({}, "hardware.launcher: torchrun needs hardware.nodes or hardware.hosts; add one of them"),
        ({"nodes": 2, "launcher": "local"}, "hardware.launcher: local starts ranks on this machine alone, but"),
        (
            {"nodes": 2, "launcher": "pdsh"},
            "'pdsh' is not one of the launchers here: deepspeed, local, slurm, torchrun",
        ),
        ({"hosts": ["here", "b.invalid"]}, "b.invalid has no address"),
        pytest.param({"hosts": ["here", "127.0.0.1:29500"]}, "127.0.0.1:29500 has no address", marks=pytest.mark.long),
        pytest.param(
            {"nodes": 2, "address": "127.0.0.1:29500"}, "127.0.0.1:29500 has no address", marks=pytest.mark.long
        ),
        (
            {"hosts": ["192.0.2.55", "127.0.0.1"]},
            "hardware.hosts begins with 192.0.2.55, but this machine is",
        ),
        ({"nodes": 2, "address": "192.0.2.7"}, "no network interface with the address 192.0.2.7; correct the address"),
    ],
)
def test_hosts_and_nodes_that_cannot_be_meant_are_refused(
    job: JobFile, settings: dict[str, object], message: str
) -> None:
    code, reported = refusal("tune", job.spoil(hardware={**OVER_NODES, **settings}))
    assert code == 2
    assert message in reported


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("", "names no host; write lines like HOST slots=NUMBER"),
        ("# none\n", "names no host; write lines like HOST slots=NUMBER"),
        ("node-a slots=1\nnode-b\n", "line 2: 'node-b' has no slots; write HOST slots=NUMBER"),
        ("node-a slots=0\n", "line 1: 'node-a slots=0' has no slots; write HOST slots=NUMBER"),
        ("node-a slots=1\nb;id slots=1\n", "line 2: 'b;id' is no name or address of a host"),
        ("node-a slots=1\nnode-a slots=1\n", "line 2: node-a is named twice; name each host once"),
        ("node-a slots=1\nnode-b slots=2\n", "has hosts with 1 and 2 slots; all nodes need equally many"),
        ("192.0.2.55 slots=4\n", "hosts begins with 192.0.2.55, but this machine is"),
        ("node-a slots=2 # this one\n", "hardware.devices: 4 ranks are more than 1 nodes with 2 slots each have"),
    ],
)
def test_a_hostfile_that_cannot_be_meant_is_refused(job: JobFile, lines: str, message: str) -> None:
    (job.path.parent / "hosts").write_text(lines)
    hardware = {"launcher": "deepspeed", "hostfile": "hosts", "devices": 4, "memory_limit": "2GiB"}
    code, reported = refusal("launch", job.spoil(hardware=hardware))
    assert code == 2
    assert message in reported


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "hardware.launcher: deepspeed needs hardware.hostfile; add it"),
        ({"hostfile": "absent"}, "absent cannot be read"),
        ({"hostfile": "absent", "nodes": 2}, "hardware.hostfile says which nodes there are; remove hardware.hosts and"),
        ({"hostfile": "absent", "launcher": "torchrun"}, "hardware.hostfile is for the launcher deepspeed"),
    ],
)
def test_a_hostfile_is_for_deepspeed_alone(job: JobFile, settings: dict[str, object], message: str) -> None:
    code, reported = refusal("launch", job.spoil(hardware={**OVER_NODES, "launcher": "deepspeed", **settings}))
    assert code == 2
    assert message in reported


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "slurm works inside an allocation, and there is none; start the command in a script for sbatch"),
        ({"hosts": ["a", "b"]}, "slurm takes the nodes of the allocation; remove hardware.hosts and hostfile"),
    ],
)
def test_slurm_needs_an_allocation(
    job: JobFile, settings: dict[str, object], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLURM_JOB_NUM_NODES", raising=False)
    code, reported = refusal("launch", job.spoil(hardware={**OVER_NODES, "launcher": "slurm", **settings}))
    assert code == 2
    assert message in reported


def test_a_command_is_submitted_only_to_slurm_whose_nodes_may_have_files_that_are_not_here(job: JobFile) -> None:
    code, reported = refusal("launch", job.spoil(model__path="./gone"), "--submit")
    assert (code, reported) == (2, "--submit needs hardware.launcher: slurm and hardware.nodes; add them")


def test_a_launcher_is_chosen_on_the_command_line(job: JobFile) -> None:
    code, reported = refusal("launch", job.spoil(), "--launcher", "torchrun")
    assert (code, reported) == (
        2,
        "hardware.launcher: torchrun needs hardware.nodes or hardware.hosts; add one of them",
    )


@pytest.mark.parametrize(("content", "why"), [(None, "No such file or directory"), (b"\xff\xfe", "it is no text")])
def test_a_token_that_cannot_be_read_is_refused(tmp_path: Path, content: bytes | None, why: str) -> None:
    file = tmp_path / "token"
    if content is not None:
        file.write_bytes(content)
    code, reported = refusal("node", "127.0.0.1:9", "--number", "1", "--token-file", file)
    assert code == 1
    assert reported == f"cannot read the token in {file} ({why}); copy the file from the node of the agent"
