"""The examples run as the README says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from groups import script, torchrun
from PIL import Image
from test_bench import run
from test_pays import cells

import train_gpt_fsdp
from lab import emulate, hosts

ROOT = Path(__file__).parent.parent
JOB = ROOT / "examples" / "train_classifier.py"


@pytest.mark.parametrize("started", [pytest.param("as the README says", marks=pytest.mark.slow), "by torchrun"])
def test_the_main_job_saves_50_times_and_stays_within_2_points_of_ddp(tmp_path, started):
    if started == "by torchrun":
        output = torchrun(JOB, "--compare", "--max-epochs=5", "--lr=0.15", logs=tmp_path)
    else:
        output = script(JOB, "--compare", "--max-epochs=8", log=tmp_path / "log", folder=tmp_path)
    lines = [line.split() for line in output.splitlines()]
    ddp, topk = (next(words for words in lines if words[:1] == [name]) for name in ("ddp", "topk"))
    assert float(ddp[1].rstrip("%")) > 90
    assert float(topk[1].rstrip("%")) > float(ddp[1].rstrip("%")) - 2
    assert ddp[-3:-1] == topk[-3:-1] != ["0", "B"]
    assert float(topk[-1].rstrip("x")) == pytest.approx(50, rel=0.02)


@pytest.mark.slow
def test_a_folder_of_images_trains_a_resnet_through_one_server(tmp_path):
    for part, count in (("train", 8), ("test", 4)):
        for name in ("cat", "dog"):
            folder = tmp_path / part / name
            folder.mkdir(parents=True)
            for number in range(count):
                Image.new("RGB", (32, 32), (number, 90 if name == "cat" else 160, 7)).save(folder / f"{number}.jpg")
    words = ["--data", str(tmp_path), "--model", "resnet20", "--max-epochs=1", "--batch-size=4",
             "--topology=single_server", "--no-bidirectional"]  # fmt: skip
    output = script(JOB, *words, log=tmp_path / "log", folder=tmp_path)
    assert re.search(r"topk +\d+\.\d\d%", output)


@pytest.mark.parametrize(("name", "share"), [("plain_ddp", 0.1), ("plain_fsdp", 0.5), ("with_accelerate", 0.5)])
def test_plain_ddp_fsdp_and_accelerate_learn_under_torchrun_with_fewer_bytes(tmp_path, name, share):
    output = torchrun(ROOT / "examples" / f"{name}.py", logs=tmp_path)
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", output)]
    assert losses[-1] < share * losses[0]
    assert float(re.search(r"this rank sent .* a step \((\d+\.\d)x less\)", output)[1]) > 40


TRANSFORMERS = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from with_transformers import TopK

model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=16, n_embd=64, n_layer=1, n_head=2))
data = [{"input_ids": row, "labels": row} for row in torch.randint(50, (64, 16))]
options = {"logging_strategy": "no", "save_steps": 2, "report_to": "none", "disable_tqdm": True}
trainer = Trainer(model, TrainingArguments("out", max_steps=4, use_cpu=True, **options), train_dataset=data)
callback = TopK(trainer, saving=50)
trainer.add_callback(callback)
batches = []

def fits(module, args, inputs):
    batches.append(len(inputs["input_ids"]))
    if trainer.args.auto_find_batch_size and batches[-1] > 7:
        raise RuntimeError("CUDA out of memory.")

model.register_forward_pre_hook(fits, with_kwargs=True)
for auto, begin in ((False, None), (True, None), (False, "out/checkpoint-2")):
    trainer.args.auto_find_batch_size = auto
    trainer.train(begin)
    sent = callback.state.report().bytes
    print("batches", *batches, "saved", sent["dense"] / (sent["uplink"] + sent["downlink"]))
    batches.clear()
"""


def test_the_callback_for_the_trainer_of_transformers_compresses_each_time_it_trains(tmp_path, monkeypatch):
    """Again with a batch that does not fit and a smaller one, and again from a checkpoint."""
    pytest.importorskip("transformers")
    (tmp_path / "job.py").write_text(TRANSFORMERS)
    monkeypatch.chdir(tmp_path)
    output = torchrun(tmp_path / "job.py", logs=tmp_path / "logs")
    assert re.findall(r"batches ([\d ]+) saved", output) == ["8 8 8 8", "8 7 7 7 7", "7 7"] * 2
    assert [float(found) for found in re.findall(r"saved (.*)", output)] == [pytest.approx(50, rel=0.05)] * 6


@pytest.mark.skipif(not hosts.available(), reason="emulated hosts need root and iproute2")
@pytest.mark.slow
def test_the_packages_bench_runs_on_two_emulated_hosts(tmp_path):
    arguments = ("1gbit", "--params=20000", "--steps=3", "--only", "DDP", "saving=50")
    said = script(ROOT / "examples" / "lab" / "emulate.py", *arguments, log=tmp_path / "log", folder=tmp_path)
    assert "2 nodes of 1 rank, gloo" in said
    assert [*cells(said)] == ["DDP", "saving=50"]


@pytest.mark.parametrize(
    ("main", "words", "message"),
    [
        (emulate.main, "", "the following arguments are required: rate"),
        (emulate.main, "fast --model resnet18", "--rate fast is not a rate; write it like 100mbit"),
        (train_gpt_fsdp.main, "--rate fast", "--rate fast is not a rate; write it like 100mbit"),
        (train_gpt_fsdp.main, "--saving 0", "saving=0.0 must be 1 or more"),
    ],
)
def test_invalid_arguments_of_scripts_are_refused_in_a_sentence(monkeypatch, capsys, main, words, message):
    monkeypatch.setattr(hosts, "available", lambda: True)
    monkeypatch.setattr(hosts, "local", None)
    with pytest.raises(SystemExit, match="2"):
        run(monkeypatch, *words.split(), main=main)
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_the_gpt_trains_with_hsdp_and_with_ours_and_prints_a_table(tmp_path):
    arguments = ["--steps", "5", "--width", "16", "--depth", "1", "--batch", "1"]
    said = script(ROOT / "examples" / "train_gpt_fsdp.py", *arguments, log=tmp_path / "log", folder=tmp_path)
    assert [*cells(said)] == ["HSDP", "saving=50"]
    assert all(0 < float(loss) < 6 for loss, *_ in cells(said).values())
