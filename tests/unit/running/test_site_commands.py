"""Commands by which tools start programs on nodes."""

import os
import socket
import subprocess

import pytest

from trials.errors import SiteError
from trials.hardware_section import HardwareSection
from trials.launchers.command_starter import Spot
from trials.launchers.network import check_first, free_port, own_address
from trials.sites.deepspeed import DeepSpeed

HERE, THERE = (Spot(node=node, ranks=(2, 2), rendezvous="10.0.0.1:1234", address="10.0.0.1") for node in range(2))


def test_under_deepspeed_programs_see_the_devices_that_the_user_chose() -> None:
    program = ("sh", "-c", 'echo "devices=$CUDA_VISIBLE_DEVICES;"')
    command = DeepSpeed(("here", "there"), "4,5").command(HERE, program, is_module=False)
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "4,5"}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout.count("devices=4,5;") == 2


@pytest.mark.parametrize(("visible", "spot"), [(None, HERE), ("4,5", THERE)])
def test_under_deepspeed_nothing_is_chosen_elsewhere_or_where_the_user_chose_nothing(
    visible: str | None, spot: Spot
) -> None:
    command = DeepSpeed(("here", "there"), visible).command(spot, ("trials.run.worker",), is_module=True)
    assert "env" not in command
    assert command[-2:] == ("-m", "trials.run.worker")


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_a_free_port_is_found_at_an_address_of_either_kind(address: str) -> None:
    assert free_port(address) > 0


def test_an_address_may_begin_with_a_colon() -> None:
    assert HardwareSection(address="::1", hosts=("::1", "me@fd00::2")).address == "::1"


@pytest.mark.parametrize("own", ["node-a", "node-a.cluster"])
@pytest.mark.parametrize("first", ["node-a", "node-a.cluster", "me@node-a", "127.0.1.1", "::1", "localhost"])
def test_the_first_host_may_be_any_name_or_address_of_this_machine(
    own: str, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: own)
    check_first([first, "node-b"], "hardware.hosts")


@pytest.mark.parametrize("first", ["192.0.2.55", "b.invalid", "a..b", "fd00::dead"])
def test_a_first_host_that_is_another_machine_is_refused(first: str) -> None:
    own = socket.gethostname()
    expected = f"hardware.hosts begins with {first}, but this machine is {own} and has no .*; name {own} first, or"
    with pytest.raises(SiteError, match=expected):
        check_first([f"me@{first}", own], "hardware.hosts")


def test_an_own_address_that_no_other_machine_reaches_is_told(caplog: pytest.LogCaptureFixture) -> None:
    assert own_address("127.0.1.1") == "127.0.1.1"
    (warning,) = caplog.messages
    assert warning.startswith("hardware.address: 127.0.1.1 is 127.0.1.1 here, where other machines do not reach")
