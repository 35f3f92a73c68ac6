"""The examples run as the README says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

ROOT = Path(__file__).parent.parent


def example(*arguments: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=400,
        cwd=ROOT,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_main_job_saves_40_times_and_stays_within_2_points_of_ddp(tmp_path):
    plot = tmp_path / "run.png"
    output = example("examples/train_classifier.py", "--compare", "--plot", str(plot))
    rows = {words[0]: words for words in map(str.split, output.splitlines()) if words and words[0] in ("ddp", "topk")}
    accuracy = {name: float(words[1].rstrip("%")) for name, words in rows.items()}
    assert accuracy["ddp"] > 90
    assert accuracy["topk"] > accuracy["ddp"] - 2
    assert rows["ddp"][4] == rows["topk"][4] != "0"
    assert float(rows["topk"][5].rstrip("x")) > 40
    assert 0 < float(rows["topk"][6]) < 1
    assert plot.stat().st_size > 10_000


@pytest.mark.slow
def test_a_folder_of_images_trains_a_resnet_through_one_server(tmp_path):
    for part, count in (("train", 8), ("test", 4)):
        for name in ("cat", "dog"):
            folder = tmp_path / part / name
            folder.mkdir(parents=True)
            for number in range(count):
                Image.new("RGB", (32, 32), (number, 90 if name == "cat" else 160, 7)).save(folder / f"{number}.jpg")
    output = example(
        "examples/train_classifier.py", "--data", str(tmp_path), "--model", "resnet20", "--max-epochs=1",
        "--batch-size=4", "--topology=single_server", "--no-bidirectional",
    )  # fmt: skip
    assert re.search(r"topk +\d+\.\d\d%", output)


@pytest.mark.slow
def test_presets_train_the_classifier_one_after_the_other():
    names = ["dgc", "parameter_server"]  # each costs seconds of starting up; test_lightning trains all of them
    output = example("examples/train_classifier.py", "--max-epochs=4", "--preset", *names)
    accuracy = {name: float(re.search(rf"^{name} +(\d+\.\d\d)%", output, re.MULTILINE)[1]) for name in names}
    assert min(accuracy.values()) > 40, accuracy


def test_a_folder_without_images_is_refused_in_words(tmp_path):
    done = subprocess.run(
        [sys.executable, "examples/train_classifier.py", "--data", str(tmp_path)],
        capture_output=True, text=True, timeout=100, cwd=ROOT, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert "there is no folder" in done.stderr


def test_plain_ddp_under_torchrun():
    output = example("-m", "torch.distributed.run", "--nproc-per-node=2", "examples/plain_ddp.py")
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", output)]
    assert losses[-1] < losses[0] / 10
    assert "instead of" in output


def test_accelerate_under_torchrun():
    output = example("-m", "torch.distributed.run", "--nproc-per-node=2", "examples/with_accelerate.py")
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", output)]
    assert losses[-1] < losses[0] / 2
    assert "instead of" in output
