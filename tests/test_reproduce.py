"""The papers' claims and the experiment on saving, on a small scale."""

from __future__ import annotations

import json
import math
import os
import time
from contextlib import nullcontext
from functools import partial
from multiprocessing import get_context
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from test_bench import run

from lab import commands, data, hosts, training
from lab.bench import steps
from lab.models import MODELS, TEXT
from lab.papers import at_size, counterexample, saving, saving_curves, second_moment, speedup, tuning, vectors
from lab.report import Panel, Result, write_report
from lightning_topk.config import TopKConfig
from lightning_topk.core.layout import k_of
from lightning_topk.volume import volume


def test_parallel_runs_come_back_by_name_and_their_errors_are_raised(monkeypatch):
    noted = {}
    jobs = {"b": partial(int, "2"), "a": partial(int, "1"), "c": partial(int, "x")}
    with monkeypatch.context() as patched:
        patched.setattr(training, "get_context", lambda _: get_context("forkserver"))  # starts at once
        with pytest.raises(ValueError, match="invalid literal"):
            training.run_all(jobs, "test", noted.__setitem__)
    del jobs["c"]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0}, raising=False)  # one new interpreter, not two
    assert training.run_all(jobs, "test") == {"b": 2, "a": 1}
    late = training.run_all({number: partial(time.sleep, 0.3) for number in range(20)}, "test", minutes=0)
    assert 1 <= len(late) < 20, "runs start after the time limit"


def test_a_result_is_written_as_text_json_picture_and_report(tmp_path):
    result = Result("bound", "water is wet", "a glass", {"Table": [{"a": 1, "b": 2.34567}, {"a": "x", "b": math.inf}]})
    result.check("wet", "yes", "yes", holds=True)
    result.check("dry", "yes", "no", holds=False)
    result.panels = [Panel("curve", "x", {"y": ([1, 2], [3, 4])}, xlog=True)]
    result.write(tmp_path)
    write_report(tmp_path)
    page = (tmp_path / "report.md").read_text()
    assert "1 of 2 statements hold" in page
    assert "| FAIL | dry" in page
    assert "| 1 | 2.346 |" in page
    assert Result.read(tmp_path / "bound.json").text() == result.text()
    json.loads((tmp_path / "bound.json").read_text(), parse_constant=pytest.fail)  # infinity is not JSON
    assert (tmp_path / "bound.svg").stat().st_size > 1000


@pytest.fixture
def images(tmp_path):
    """A folder of ten classes, each with one training image and one held-out image."""
    for part in ("train", "test"):
        for number, name in enumerate("abcdefghij"):
            (tmp_path / part / name).mkdir(parents=True)
            Image.new("RGB", (32, 32), (25 * number, 120, 250 - 25 * number)).save(tmp_path / part / name / "0.png")
    return tmp_path


def little_text():
    parts = (part[::20] for part in vars(data.documentation()).values() if isinstance(part, torch.Tensor))
    return data.Data(*parts)


@pytest.mark.parametrize("model", ["mlp", "wide mlp", "cnn", "lstm", "char lstm", "gpt", "resnet20"])
def test_simulated_training_learns_and_sends_what_is_predicted(monkeypatch, images, model):
    optimizer, steps, batch, folder = training.Optimizer(0.3), 30, 10, None
    if model in TEXT:
        monkeypatch.setattr(training, "documentation", little_text)
        optimizer, steps, batch = training.Optimizer(0.01, 0.9, adamw=True, cosine=True, clip_norm=1.0), 15, 4
    elif model == "resnet20":
        optimizer, batch, folder = training.Optimizer(0.05), 5, images
    start = training.Problem(model, 0, folder)
    before, *_ = start.evaluate(start.start)
    run = training.train(model, TopKConfig(ratio=0.1), 2, steps, optimizer, 0, batch, data=folder)
    assert run.loss < before
    assert len(run.union) == steps
    sent = volume(TopKConfig(ratio=0.1), [len(start.start)], world=2)
    assert (run.uplink_bytes, run.downlink_bytes) == (sent.uplink, sent.downlink)


def test_simulated_gradients_are_autograds():
    mlp = training.Problem("mlp", seed=0)
    batches = torch.tensor([[0, 1, 2], [3, 4, 5]])
    images, labels = data.digits().examples, data.digits().labels
    unused = torch.Generator()
    for batch, gradient in zip(batches, mlp.gradients(mlp.start, batches, unused), strict=True):
        mlp.net.zero_grad()
        torch.nn.functional.cross_entropy(mlp.net(images[batch]), labels[batch]).backward()
        expected = torch.cat([p.grad.flatten() for p in mlp.parameters])
        torch.testing.assert_close(gradient, expected, atol=1e-6, rtol=1e-4)


def test_crop_and_flip_only_shifts_and_mirrors_images():
    image = 1 + torch.arange(2 * 6 * 6.0).view(1, 2, 6, 6)
    many = data.crop_and_flip(image.expand(500, -1, -1, -1), torch.Generator().manual_seed(0))
    shifted = torch.nn.functional.pad(image[0], (4, 4, 4, 4)).unfold(1, 6, 1).unfold(2, 6, 1).permute(1, 2, 0, 3, 4)
    whole = torch.cat([shifted, shifted.flip(-1)]).flatten(0, 1)
    found = (many.unsqueeze(1) == whole).flatten(2).all(2)  # [images, places]
    assert found.any(1).all()
    assert found.any(0).sum() > 120, "few of the 162 places were drawn"


def test_every_batch_of_an_evaluation_has_all_classes(monkeypatch):
    """Folders are sorted by class, and batch norm uses the statistics of the batch."""
    labels = torch.arange(1200) // 600
    images = labels.float().view(-1, 1, 1, 1).expand(-1, 1, 8, 8)
    problem = training.Problem("mlp", 0, data.Data(images, labels, images, labels))
    scores, means = problem._scores, []
    monkeypatch.setattr(problem, "_scores", lambda weights, batch: means.append(batch.mean()) or scores(weights, batch))
    problem.evaluate(problem.start)
    assert means == [0.5] * 6


def test_convergence_and_tuning_judge_every_system_and_mark_a_learning_rate_at_the_edge_of_its_grid(monkeypatch):
    tried = {lr: [training.Run(lr, accuracy=90.0)] * 2 for lr in (0.1, 0.3)}
    monkeypatch.setattr(tuning, "sweep", lambda systems, *_: dict.fromkeys(systems, tuning.Tuned(tried)))
    systems, thesis = tuning.convergence().tables.values()
    assert [row["system"] for row in systems] == [*tuning.ALL]
    assert (systems[0]["lr"], systems[0]["accuracy"]) == ("0.1 (edge of the grid)", "90.0 ± 0.0")
    assert [row["N"] for row in thesis] == [20, 100]
    (rows,) = tuning.tuning().tables.values()
    assert [row["system"] for row in rows] == [*tuning.SYSTEMS]
    middle = tuning.Tuned({0.03: [training.Run(2.0, accuracy=90.0)], **tried})
    assert (middle.lr, middle.lr_in_words) == (0.1, "0.1")


def test_opposite_workers_favour_the_second_compression_and_the_toys_gap_is_exact():
    uni, bi = (counterexample.descend("opposites", 0, each, 0.1, 500)[-100:].mean() for each in ("uni", "bi"))
    assert uni > 5 * bi
    x = torch.randn(100, dtype=torch.float64)
    objective = sum((x - a).square().sum() / 2 for a in (1.0, 5.0, 10.0)) / 3
    toy = counterexample.toy(seed=0)
    assert float(toy.gap(x)) == pytest.approx(float(objective) - 677.7778, rel=1e-6)
    assert torch.allclose(sum(toy.gradients(x)) / 3, x - 16 / 3)


def test_the_union_of_two_selections_is_at_most_twice_one_and_equal_bytes_are_not_more():
    k = k_of(4810, 0.01)
    assert k <= saving._union("mlp", 0.01, 2) <= 2 * k
    assert saving._slope({2: 6.0, 4: 12.0, 8: 24.0, 16: 24.0}, up_to=8) == pytest.approx(1.0)
    at, above = (tuning._bytes(TopKConfig(ratio=tuning.EQUAL + more, wire="bf16")) for more in (0, 0.001))
    assert at <= tuning._bytes(tuning.SYSTEMS["uni"]) < above


def test_the_shape_and_the_error_of_known_vectors():
    assert vectors.error(torch.ones(1000), 0.1) == pytest.approx(0.9), "the general bound"
    assert vectors.error(torch.tensor([3.0, 4.0]), 0.5) == pytest.approx(9 / 25)
    normal = vectors.statistics(torch.randn(100_000, generator=torch.Generator().manual_seed(0)).double())
    assert normal["kurtosis"] == pytest.approx(3, abs=0.1)
    assert normal["π² below the line"] > 0.999
    signs = vectors.statistics(torch.ones(1000).double() * torch.arange(1000).remainder(2).mul(2).sub(1))
    assert signs["π² below the line"] < 0.01


def timed(rank: int, world: int) -> dict[str, dict[str, float]]:
    return speedup.timed({"numel": 100_000, "peers": speedup.NAMES, "settings": {}, "seconds": 0}, rank, world)


@pytest.mark.gloo
def test_an_exchange_of_every_system_is_timed_and_sends_what_is_predicted(groups, monkeypatch):
    ranks = groups(2).run(timed)
    found = steps.worst(ranks)
    assert [*found] == speedup.NAMES
    for name in speedup.SYSTEMS:
        assert found[name]["counted"] == found[name]["predicted"] > 0
    monkeypatch.setattr(hosts, "emulate", lambda *_: nullcontext(SimpleNamespace(run=lambda *_, timeout: ranks)))
    rows = speedup.run().tables["Seconds of a step"]
    assert [row["system"] for row in rows] == speedup.NAMES
    assert all(row[rate] > 0 for row in rows for rate in speedup.RATES)


def test_a_claim_that_fails_leaves_the_report_of_the_others(monkeypatch, tmp_path):
    monkeypatch.setattr(hosts, "available", lambda: False)
    claims = {"saving": lambda: Result("saving", "it holds", "a setting"), "speedup": speedup.run}
    monkeypatch.setattr(commands, "CLAIMS", [*claims])
    monkeypatch.setattr(commands, "function_of", lambda name: claims[name.removeprefix("reproduce ")])
    with pytest.raises(SystemExit, match="Emulated hosts need root and iproute2"):
        run(monkeypatch, "reproduce", "--all", "--out", str(tmp_path))
    assert "## saving: it holds" in (tmp_path / "report.md").read_text()


def test_saving_curves_resume_and_show_finished_runs(monkeypatch, tmp_path):
    learners = tuple(saving_curves.Learner("mlp", kind, 0.05, 5) for kind in ("SGD", "AdamW"))
    monkeypatch.setattr(saving_curves, "LEARNERS", learners)
    monkeypatch.setattr(training, "run_all", alone)
    few = partial(saving_curves.run, savings=(200, 10), lengths=(8, 4), out=tmp_path)
    first = few(seeds=1)
    lines = (tmp_path / "saving-curves.jsonl").read_text().splitlines()
    assert len(lines) == 2 * 2 * 3, "each learner and length, dense and with two savings"
    assert "4 steps" in lines[0], "short runs come first"
    (table,) = first.tables.values()
    assert [row["steps"] for row in table] == ["4", "8", "4", "8"]
    assert table[0]["saving 10"].endswith("(1 seed)")
    (panel,) = first.panels
    assert list(panel.curves) == list(panel.errors) == ["mlp, SGD", "mlp, AdamW"]
    monkeypatch.setattr(training, "run_all", lambda jobs, *_: {})
    assert few(seeds=3).tables == first.tables, "missing runs are left out"
    (mine,) = few(models=["mlp"], optimizers=["SGD"], lengths=(4,), savings=(10,)).tables.values()
    assert mine == [{head: cell for head, cell in table[0].items() if head != "saving 200"}]
    with pytest.raises(ValueError, match="there is no Adam here: there are AdamW, SGD, mlp"):
        few(optimizers=["Adam"])
    with pytest.raises(ValueError, match=r"ratio=0\.0 must be in"):
        few(savings=(10, 0.0))


def test_at_size_compares_rates_keeps_learning_curves_and_repeats_no_run(monkeypatch, images, tmp_path):
    adam = training.Optimizer(0.01, 0.9, adamw=True, cosine=True, clip_norm=1.0, warmup=2)
    convnet = at_size.Course(training.Optimizer(0.05), 1, 2, images=True)
    monkeypatch.setattr(at_size, "COURSES", {"gpt": at_size.Course(adam, 1, 2), "convnet": convnet})
    monkeypatch.setattr(training, "run_all", alone)
    monkeypatch.setattr(training, "documentation", little_text)
    measured = partial(at_size.run, images, steps=2, seeds=1, out=tmp_path)
    result = measured(models=["gpt", "convnet"], systems=at_size.SYSTEMS)
    names = [*at_size.SYSTEMS]
    names[names.index("PowerSGD")] += " 2"
    assert [[row[""] for row in rows] for rows in result.tables.values()] == [names] * 2
    for panel in result.panels:
        assert [*panel.curves] == [*at_size.SYSTEMS]
        assert {len(x) for x, _ in panel.curves.values()} == {2}
    result = measured(models=["gpt"], rates=["0.01", "1e-6"])
    assert result.panels[0].curves["dense"][0] == [1e-6, 0.01]
    (table,) = result.tables.values()
    dense, ours = ({row["learning rate"]: row for row in table if row[""] == name} for name in at_size.BOTH)
    assert [*dense] == [*ours] == ["1e-06", "0.01 (best)"]
    assert ours["1e-06"]["behind dense at this rate, %"] != ours["1e-06"]["behind dense at its best, %"]
    monkeypatch.setattr(training, "run_all", lambda jobs, *_: {}[next(iter(jobs))] if jobs else {})
    assert measured(models=["gpt"], rates=["0.01", "1e-6"]).tables == result.tables
    with pytest.raises(ValueError, match="there is no bert here: there are gpt, convnet, dense, saving 50"):
        measured(models=["bert"])
    with pytest.raises(ValueError, match="pass their folder by --data"):
        at_size.run(models=["convnet"], out=tmp_path)


def test_simulated_post_local_sgd_averages_gradients_first_and_then_weights():
    exchange = training.LocalSGD(2, 3, [torch.Size([4])], warmup=1)
    gradients = [torch.full([4], float(worker)) for worker in range(3)]
    assert all(torch.equal(each, torch.ones(4)) for each in exchange.step(gradients))
    assert all(torch.equal(a, b) for a, b in zip(exchange.step(gradients), gradients, strict=True))
    weights = [each.clone() for each in gradients]
    exchange.average_(weights)  # after the first step alone, as torch's PeriodicModelAverager
    assert all(torch.equal(each, torch.ones(4)) for each in weights)
    exchange.step(gradients)
    exchange.average_(gradients)
    assert gradients[2].eq(2).all(), "a period has two steps"
    assert exchange.sent_bytes["uplink"] == [2 * (4 * 4 * 2 // 3)] * 3


def test_simulated_power_sgd_delivers_low_ranks_exactly_and_loses_nothing():
    shapes = [torch.Size([40, 5, 8]), torch.Size([7])]
    ranks = at_size.PowerSGD(2, 3, shapes)
    low = torch.randn(40, 2) @ torch.randn(2, 40)
    gradients = [torch.cat([scale * low.flatten(), torch.ones(7)]) for scale in (0.5, 1.0, 1.5)]
    torch.testing.assert_close(ranks.step(gradients)[2], gradients[1])
    assert ranks.sent_bytes == {way: [4 * (2 * (40 + 40) + 7) * 2 // 3] * 3 for way in ("uplink", "downlink")}
    total, delivered = torch.zeros(1607), torch.zeros(1607)
    for _ in range(5):
        gradients = [torch.randn(1607) for _ in range(3)]
        total += sum(gradients) / 3
        delivered += ranks.step(gradients)[0]
        torch.testing.assert_close(delivered + ranks.residual, total, atol=1e-4, rtol=0)
    dense = at_size.PowerSGD(0, 3, shapes)
    torch.testing.assert_close(dense.step(gradients)[0], sum(gradients) / 3)
    assert dense.sent_bytes["uplink"] == [4 * 1607 * 2 // 3] * 3


def test_an_exchange_of_the_mean_gradient_sees_the_examples_of_all_workers(monkeypatch):
    drawn = []

    def gradients(problem, theta, batches, generator):
        drawn.append(batches.shape)
        return [torch.zeros_like(theta)] * len(batches)

    monkeypatch.setattr(training.Problem, "gradients", gradients)
    for workers, batch in ((5, 20), (8, 4), (8, 8)):
        training.train("mlp", partial(at_size.PowerSGD, 0), workers, 1, training.Optimizer(0.1), 0, batch)
    assert drawn == [(5, 20), (1, 32), (2, 32)]


@pytest.mark.parametrize(("model", "millions"), [("large gpt", 10.8), ("resnet18", 11.0), ("narrow resnet18", 2.8)])
def test_large_models_have_the_sizes_that_are_given(model, millions):
    sizes = [parameter.numel() for parameter in MODELS[model]().parameters()]
    assert sum(sizes) / 1e6 == pytest.approx(millions, abs=0.06)


def test_the_second_moment_is_that_of_dense_training_if_everything_is_delivered(monkeypatch):
    monkeypatch.setattr(training, "documentation", little_text)
    everything = TopKConfig(ratio=1, wire="fp32")
    monkeypatch.setattr(second_moment, "TopKConfig", lambda saving: everything)
    rows = second_moment.measure(0.01, steps=10)
    ratios = [row[head] for row in rows for head in row if head.startswith("after")]
    assert ratios[:3] == pytest.approx([1, 1, 1], rel=1e-4)
    assert all(math.isnan(ratio) or ratio == pytest.approx(1, rel=1e-4) for ratio in ratios)


def test_source_code_is_held_out_by_files(monkeypatch, tmp_path):
    for number in range(40):
        (tmp_path / f"{number:02}.py").write_bytes(bytes([ord("a") + number % 20, 200]) * 100)
    monkeypatch.setattr(data, "get_path", lambda name: str(tmp_path))
    found = data.source_code.__wrapped__()
    assert set(found.held_examples.unique().tolist()) == {ord("a"), 127}
    assert ord("a") not in found.examples
    assert torch.equal(found.examples[:, 1:], found.labels[:, :-1])


def test_a_gpt_predicts_the_next_characters_and_sees_no_later_ones():
    gpt = training.Problem("gpt", seed=0)
    assert gpt.data.examples.shape[1:] == gpt.data.labels.shape[1:] == (64,)
    assert torch.equal(gpt.data.examples[0, 1:], gpt.data.labels[0, :-1])
    text = gpt.data.examples[:1].clone()
    before = gpt.net(text)
    text[0, 40] += 1
    after = gpt.net(text)
    torch.testing.assert_close(before[:, :40], after[:, :40])
    assert not torch.allclose(before[:, 40:], after[:, 40:])


def alone(jobs, title, note, *_):
    """Runs jobs in this process, where a test's patches apply."""
    for key, job in jobs.items():
        note(key, job())
