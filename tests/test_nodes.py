"""Two nodes of two ranks each, as network namespaces: launching, bytes between them, and a rank that dies."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lightning_topk.config import TopKConfig
from lightning_topk.lab import hosts
from lightning_topk.volume import volume

pytestmark = pytest.mark.skipif(not hosts.available(), reason="emulated hosts need root and iproute2")

JOB = str(Path(__file__).with_name("job.py"))
STRATEGY = {"ratio": 0.05, "topology": "hierarchical", "process_group_backend": "gloo"}
OPTIONS = {"strategy": STRATEGY, "devices": 2, "num_nodes": 2, "max_epochs": 3, "limit_train_batches": 4}
TORCHRUN = "-m torch.distributed.run --nnodes=2 --nproc-per-node=2 --max-restarts=2 --rdzv-backend=c10d --rdzv-id=1"


def launched(group: hosts.Hosts, way: str, folder: Path) -> list[tuple[int, str, str]]:
    """Launches the job in one way; returns exit codes and outputs of the started processes."""
    address, port = group.address.split(":")
    started, base = [], {"MASTER_ADDR": address, "MASTER_PORT": port}
    kill = (
        "3" if way == "torchrun" else "-1",
        str(4 * 5 + 2),
    )  # between nodes, in the sixth step: four requests per step
    job = [JOB, str(folder), *kill, json.dumps(OPTIONS)]
    for node in range(2):
        if way == "torchrun":
            rendezvous = [f"--rdzv-endpoint={group.address}", f"--rdzv-conf=is_host={1 - node}"]
            options = [*TORCHRUN.split(), f"--local-addr=10.77.0.{node + 1}", *rendezvous]
            started.append(group.start(node, [sys.executable, *options, *job], {}))
        elif way == "lightning":
            started.append(group.start(node, [sys.executable, *job], {**base, "NODE_RANK": str(node)}))
        else:
            for local in range(2):
                task = {"NTASKS": 4, "NTASKS_PER_NODE": 2, "PROCID": 2 * node + local, "LOCALID": local, "NODEID": node}
                names = {"JOB_ID": 1, "JOB_NAME": "train", "NODELIST": "emulated"}
                slurm = {f"SLURM_{key}": str(value) for key, value in {**task, **names}.items()}
                started.append(group.start(node, [sys.executable, *job], {**base, **slurm}))
    try:
        outputs = [process.communicate(timeout=400) for process in started]
    finally:
        for process in started:
            process.kill()
    return [(process.returncode, *output) for process, output in zip(started, outputs, strict=True)]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_way_to_launch_two_nodes_trains_alike_and_a_rank_may_die(tmp_path):
    ends, said = {}, {}
    try:
        with hosts.emulate(2, "1gbit", 2) as group:
            for way in ("slurm", "lightning", "torchrun"):
                found = launched(group, way, tmp_path / way)
                assert all(code == 0 for code, *_ in found), "\n".join(str(each) for each in found)
                end = torch.load(tmp_path / way / "epoch=2.ckpt", weights_only=True)
                assert end["lightning_topk"]["steps"] == 12
                ends[way] = torch.cat([weight.flatten() for weight in end["state_dict"].values()])
                said[way] = found[0][1:]
    except RuntimeError as error:  # a container may be root without the right to make namespaces
        pytest.skip(f"no network namespaces here: {error}")
    assert torch.equal(ends["lightning"], ends["slurm"])
    # The run in which a rank dies resumes with the mean of the residuals, so its bits differ.
    assert (ends["torchrun"] - ends["slurm"]).norm() < 0.05 * ends["slurm"].norm()
    plan = volume(TopKConfig(ratio=0.05, topology="hierarchical"), [[2, 64]], 4, local=2, step=11)
    told = json.loads(said["slurm"][0].splitlines()[-1])
    assert told["topk/inter_node_bytes"] == plan.inter_node
    assert told["topk/intra_node_bytes"] == plan.intra_node
    assert re.search(r"hierarchical exchange of bucket \d+ .* failed on rank \d of 4", said["torchrun"][1])
    left = subprocess.run(["pgrep", "-f", JOB], capture_output=True, text=True, check=False).stdout
    assert left == "", "orphaned processes"


SERVER = "import socket; print(len(socket.create_server(('', 9)).accept()[0].makefile('rb').read()))"
CLIENT = """
import socket, time
start = time.perf_counter()
with socket.create_connection(("10.77.0.1", 9)) as link:
    print(time.perf_counter() - start)
    link.sendall(bytes(300_000))
"""


def test_a_delayed_link_takes_its_round_trip_and_delivers_all_bytes():
    try:
        with hosts.emulate(2, "1gbit/100ms") as group:
            server = group.start(0, [sys.executable, "-c", SERVER], {})
            while not group.start(0, ["ss", "-Hltn", "sport = :9"], {}).communicate()[0]:
                assert server.poll() is None
            connected, _ = group.start(1, [sys.executable, "-c", CLIENT], {}).communicate(timeout=60)
            arrived, _ = server.communicate(timeout=60)
    except (RuntimeError, OSError) as error:  # no namespaces, or no /dev/net/tun
        pytest.skip(f"no delayed links here: {error}")
    assert float(connected) >= 0.1
    assert int(arrived) == 300_000
