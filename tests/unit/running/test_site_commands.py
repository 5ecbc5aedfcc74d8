"""Commands by which tools start programs on nodes."""

import os
import subprocess

import pytest

from trials.hardware_section import HardwareSection
from trials.launchers.command_starter import Spot
from trials.launchers.network import free_port
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
