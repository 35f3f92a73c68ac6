"""Two nodes of two ranks each, as network namespaces: launching, bytes between them, and a rank that dies."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
import torch

from lightning_topk.config import TopKConfig
from lightning_topk.lab import hosts
from lightning_topk.volume import volume

pytestmark = pytest.mark.skipif(not hosts.available(), reason="emulated hosts need root and iproute2")

SCRIPT = """
import json, os, signal, sys
import lightning as L, torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning_topk import CompressionMonitor, TopKStrategy
from lightning_topk.runtime import collectives as drive

folder, kill = sys.argv[1:]
first_life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
perform, count = drive.perform, 0

def striking(*args):
    global count
    count += 1
    if kill == "kill" and first_life and os.environ["RANK"] == "3" and count == 4 * 5 + 2:
        os.kill(os.getpid(), signal.SIGKILL)  # between the nodes, in the sixth step: four requests each
    return perform(*args)

class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(64, 300)

    def training_step(self, batch, index):
        return self.net(batch).square().mean()

    def train_dataloader(self):
        data = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
        return torch.utils.data.DataLoader(data, batch_size=4)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

class Told(Callback):
    def on_train_end(self, trainer, pl_module):
        if trainer.global_rank == 0:
            print(json.dumps({key: float(value) for key, value in trainer.callback_metrics.items()}), flush=True)

if __name__ == "__main__":
    drive.perform = striking
    L.seed_everything(0, verbose=False)
    trainer = L.Trainer(strategy=TopKStrategy(ratio=0.05, topology="hierarchical",
        process_group_backend="gloo"), accelerator="cpu", devices=2, num_nodes=2, max_epochs=3, logger=False,
        enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=1, callbacks=[
            CompressionMonitor(details=True), ModelCheckpoint(folder, filename="{epoch}", save_last=True), Told()])
    last = os.path.join(folder, "last.ckpt")
    trainer.fit(Model(), ckpt_path=last if os.path.exists(last) else None)
"""


def launched(group: hosts.Hosts, way: str, script: str, folder: str) -> list[tuple[int, str, str]]:
    """Runs the script as a way of launching does; return codes and outputs of what was started."""
    address, port = group.address.split(":")
    started, base = [], {"MASTER_ADDR": address, "MASTER_PORT": port}
    for node in range(2):
        if way == "torchrun":
            options = "--nnodes=2 --nproc-per-node=2 --max-restarts=2 --rdzv-backend=c10d --rdzv-id=1"
            options += f" --local-addr=10.77.0.{node + 1}"
            rendezvous = [f"--rdzv-endpoint={group.address}", f"--rdzv-conf=is_host={1 - node}"]
            command = [
                sys.executable,
                "-m",
                "torch.distributed.run",
                *options.split(),
                *rendezvous,
                script,
                folder,
                "kill",
            ]
            started.append(group.start(node, command, {}))
        elif way == "lightning":
            started.append(group.start(node, [sys.executable, script, folder, "no"], {**base, "NODE_RANK": str(node)}))
        else:
            for local in range(2):
                task = {"NTASKS": 4, "NTASKS_PER_NODE": 2, "PROCID": 2 * node + local, "LOCALID": local, "NODEID": node}
                names = {"JOB_ID": 1, "JOB_NAME": "train", "NODELIST": "emulated"}
                slurm = {f"SLURM_{key}": str(value) for key, value in {**task, **names}.items()}
                started.append(group.start(node, [sys.executable, script, folder, "no"], {**base, **slurm}))
    try:
        outputs = [process.communicate(timeout=400) for process in started]
    finally:
        for process in started:
            process.kill()
    return [(process.returncode, *output) for process, output in zip(started, outputs, strict=True)]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_way_to_launch_two_nodes_gives_the_same_bits_and_a_rank_that_dies_costs_nothing(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    ends, said = {}, {}
    try:
        with hosts.emulate(2, "1gbit", 2) as group:
            for way in ("slurm", "lightning", "torchrun"):
                found = launched(group, way, str(script), str(tmp_path / way))
                assert all(code == 0 for code, *_ in found), "\n".join(str(each) for each in found)
                ends[way] = torch.load(tmp_path / way / "epoch=2.ckpt", weights_only=True)
                said[way] = found[0][1:]
    except RuntimeError as error:  # a container may be root without the right to make namespaces
        pytest.skip(f"no network namespaces here: {error}")
    for way in ("lightning", "torchrun"):
        for name, weight in ends["slurm"]["state_dict"].items():
            assert torch.equal(ends[way]["state_dict"][name], weight), way
    # Each rank of a node checkpoints its own piece.
    residuals = ends["slurm"]["lightning_topk"]
    assert residuals["node_sizes"] == {"net.weight": 2, "net.bias": 2}

    config = TopKConfig(ratio=0.05, topology="hierarchical")
    plan = volume(config, [[300, 64 * 300]], 4, local=2, step=11)
    told = json.loads(said["slurm"][0].splitlines()[-1])
    assert told["topk/inter_node_bytes"] == plan.inter_node
    assert told["topk/intra_node_bytes"] == plan.intra_node

    errors = said["torchrun"][1]
    assert re.search(r"hierarchical exchange of bucket \d+ .* failed on rank \d of 4", errors)
    left = subprocess.run(["pgrep", "-f", str(script)], capture_output=True, text=True, check=False).stdout
    assert left == "", "orphaned processes"
