"""``python -m lightning_topk env`` describes any machine, for a bug report."""

from __future__ import annotations

from importlib import metadata

import pytest
import torch
from test_bench import run

from lightning_topk import __main__, env

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE")


@pytest.fixture
def said(monkeypatch, capsys):
    """Runs the command with these variables of a launcher; returns its facts by name."""

    def says(**variables: str) -> dict[str, str]:
        for name in VARIABLES:
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        run(monkeypatch, "env", main=__main__.main)
        return dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())

    return says


def test_the_report_names_versions_devices_and_the_variables_that_steer_communication(said, monkeypatch):
    monkeypatch.setattr(env, "PACKAGES", (*env.PACKAGES, "no-such-package"))
    facts = said(NCCL_SOCKET_IFNAME="eth7", GLOO_SOCKET_IFNAME="eth8", TORCH_NCCL_TRACE="1", SECRET_TOKEN="no")
    assert facts["torch"] == torch.__version__
    assert facts["lightning"] == metadata.version("lightning")
    assert facts["no-such-package"] == "not installed"
    assert facts["CPU"].endswith("CPU cores")
    assert {"python", "lightning_topk", "numba", "triton", "GPUs", "CUDA", "NCCL", "system"} <= {*facts}
    assert facts["NCCL_SOCKET_IFNAME"] + facts["GLOO_SOCKET_IFNAME"] + facts["TORCH_NCCL_TRACE"] == "eth7eth81"
    assert "SECRET_TOKEN" not in facts
    assert facts["ranks"].endswith("run this command under the launcher that you train with")
    assert said(WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", RANK="1", LOCAL_RANK="1") == {}, "one rank of a node reports"


@pytest.mark.parametrize(
    ("gpus", "variables", "expected"),
    [
        (0, {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}, "8, 4 per node: gloo, topology sharded"),
        (4, {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}, "8, 4 per node: nccl, topology hierarchical"),
        (1, {"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "1"}, "2, 1 per node: nccl, topology sharded"),
        (8, {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8"}, "8, 8 per node: nccl, topology sharded"),
        (0, {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "3"}, "8, 1 per node: gloo, topology sharded"),
        (0, {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE='0' must be an integer of at least 1"),
        (0, {"WORLD_SIZE": "-4"}, "WORLD_SIZE='-4' must be"),
        (0, {"SLURM_NTASKS": "eight"}, "SLURM_NTASKS='eight' must be"),
    ],
)
def test_the_report_says_which_backend_and_topology_a_launch_gets(said, monkeypatch, gpus, variables, expected):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device.index}")
    assert said(**variables)["ranks"].startswith(expected)
