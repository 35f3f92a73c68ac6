"""The README and the guides are correct: commands have the documented options, calls the documented arguments."""

import ast
import inspect
import json
import re
import shlex
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from statistics import mean

import pytest
import torch
from groups import on_ranks, script
from ranks import attached, batch, shared
from test_bench import run
from torch import nn

import lightning_topk
import lightning_topk.fabric
from lab import commands
from lab.papers import at_size, fine_tuning, saving_curves, scripts
from lab.report import standard_error
from lab.training import Runs
from lightning_topk import TopKConfig, __main__
from lightning_topk.bucket import plan_step
from lightning_topk.core.ops import fast

ROOT = Path(__file__).parents[1]
GUIDES = sorted((ROOT / "examples" / "guides").glob("*.md"))
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
    *GUIDES,
    *(ROOT / "examples" / name for name in ("lab/bench/compress-step.md", "reproduced/archive.md")),
]
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
NAMES = ("TopKStrategy", "TopKModelParallelStrategy", "CompressionMonitor", "TopKConfig", "attach")
CALLS = {
    **{name: getattr(lightning_topk, name) for name in NAMES},
    "lightning_topk.fabric.TopKStrategy": lightning_topk.fabric.TopKStrategy,
    "lightning_topk.attach": lightning_topk.attach,
}

PASSED_ON = ["bucket_cap_mb", "static_graph", "find_unused_parameters", "timeout", "accelerator", "cluster_environment"]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def code_of(page: Path) -> list[str]:
    """Python blocks, and inline code that calls this package."""
    text = page.read_text()
    inline = re.findall(r"`([\w.]+\([^`]*\))`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))
    return [*blocks(page, "python"), *(call for call in inline if call.partition("(")[0] in CALLS)]


@every_page
def test_documented_commands_have_their_options(page, capsys):
    parsers = {"-m lightning_topk": __main__.make_parser(), "examples/lab": commands.make_parser()}
    for line in "\n".join(blocks(page, "sh")).replace("\\\n", " ").splitlines():
        found = re.search(r"python (-m lightning_topk|examples/lab) (.*)", line)
        if found:
            try:
                parsers[found[1]].parse_args(shlex.split(found[2], comments=True))
            except SystemExit:
                pytest.fail(f"{line}\n{capsys.readouterr().err}")


def test_documented_plans_run(monkeypatch, capsys):
    lines = "\n".join(block for page in PAGES for block in blocks(page, "sh"))
    made = [line for line in re.findall(r"lightning_topk (plan .*)", lines) if "mine.models.Net" not in line]
    for line in made:
        run(monkeypatch, *shlex.split(line, comments=True), main=__main__.main)
        assert re.search(r"\| (sharded|hierarchical) \(default\) +\|", capsys.readouterr().out), line
    assert len(made) >= 2


@every_page
def test_documented_calls_have_their_arguments(page):
    wrong = []
    for code in code_of(page):
        for call in ast.walk(ast.parse(code.replace("...", "**{}").replace("…", "**{}"))):
            name = ast.unparse(call.func) if isinstance(call, ast.Call) else ""
            if name not in CALLS:
                continue
            known = inspect.signature(CALLS[name]).parameters
            known = {*known, *PASSED_ON, *(inspect.signature(TopKConfig).parameters if "settings" in known else ())}
            wrong += [f"{name}({key.arg}=)" for key in call.keywords if key.arg and key.arg not in known]
    assert wrong == []


@every_page
def test_links_lead_to_existing_files_and_headings(page):
    dead = []
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"https?:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        heads = re.findall(r"^#+ (.*)", path.read_text(), re.MULTILINE) if anchor and path.exists() else []
        anchors = {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}
        if not path.exists() or (anchor and anchor not in anchors):
            dead.append(target)
    assert dead == []


def test_the_readme_and_the_guides_are_short_and_linked():
    """The README links all but momentum and the papers, which are background, and which the guides link."""
    first, guides = (ROOT / "README.md").read_text(), "".join(page.read_text() for page in GUIDES)
    background = {"momentum.md", "papers.md"}
    assert first.count("\n") <= 100
    assert [page.name for page in GUIDES if page.read_text().count("\n") > 120] == []
    assert {page.name for page in GUIDES if f"(examples/guides/{page.name}" not in first} <= background
    assert [name for name in background if f"({name}" not in guides] == []


def test_messages_of_the_package_name_existing_pages():
    named = {
        (path.name, page)
        for path in (ROOT / "lightning_topk").rglob("*.py")
        for page in re.findall(r"[\w./-]+\.md\b", path.read_text())
    }
    assert named
    assert [(name, page) for name, page in named if not (ROOT / page).exists()] == []


def test_every_public_name_is_in_the_reference():
    page = (ROOT / ".ci" / "reference" / "index.rst").read_text()
    modules = ("schedule", "fabric", "metrics", "select")
    listed = {name for module in modules for name in dir(getattr(lightning_topk, module)) if module in page}
    missing = [name for name in lightning_topk.__all__ if f"lightning_topk.{name}" not in page and name not in listed]
    assert missing == ["__version__"]


def test_tables_are_those_of_the_committed_runs():
    source = spec_from_file_location("tables", ROOT / ".ci" / "tables.py")
    tables = module_from_spec(source)
    source.loader.exec_module(tables)
    named = [name for page in tables.PAGES for name in re.findall(r"<!-- table: ([\w-]+) -->", page.read_text())]
    assert sorted(named) == sorted(tables.TABLES), "a table that no page shows, or that does not exist"
    old = [page.name for page in tables.PAGES if tables.filled(page.read_text()) != page.read_text()]
    assert not old, "run python .ci/tables.py"


FIGURES = [
    ("evidence.md", ("tied gpt", 300), "{:.1f} ± {:.1f} % after 300 steps,"),
    ("evidence.md", ("tied gpt", 1000), "{:.1f} ± {:.1f} after 1,000,"),
    ("evidence.md", ("tied gpt", 3000), "{:.1f} ± {:.1f} after 3,000;"),
    ("evidence.md", ("tied gpt", 300, 0, "AdamW 0.95"), "beta2 .95: {:.1f} ± {:.1f} and"),
    ("evidence.md", ("tied gpt", 300, 0, "AdamW 0.999"), ".999: {:.1f} ± {:.1f} and"),
    ("evidence.md", ("gpt", 1000), "**GPT of 0.12 million:** {:.1f} ± {:.1f} % after 1,000 steps."),
    ("evidence.md", ("gpt", 1000), "With the small batch it is {:.1f} ± {:.1f} % behind."),
    ("evidence.md", ("gpt", 500, 32), "it is {:.1f} ± {:.1f} % behind with the large batch"),
    ("settings.md", ("gpt", 500, 32), "a GPT is {:.1f} % behind after 500 steps"),
    ("evidence.md", ("gpt", 1000, 32), "and {:.1f} ± {:.1f} % behind at dense training's"),
    ("settings.md", ("gpt", 1000, 32), "and {:.1f} % behind at dense training's"),
    ("evidence.md", ("convnet", 1000), "**Convnet:** {:.1f} ± {:.1f} points after 1,000 steps"),
    ("evidence.md", ("narrow resnet18", 3000), "{:.1f} ± {:.1f} points after 3,000 steps with 0.017"),
    ("evidence.md", ("large gpt", 1000), "{:.1f} ± {:.1f} % after 1,000 steps,"),
    ("evidence.md", ("large gpt", 3000), "{:.1f} ± {:.1f} % after 3,000 at the rate chosen"),
]
"""Sentences with the gap to dense training at its best rate, and its standard error: page, runs, and words."""


@pytest.mark.parametrize(("page", "which", "words"), FIGURES, ids=[f"{page} {which}" for page, which, _ in FIGURES])
def test_figures_in_sentences_are_those_of_the_committed_runs(page, which, words):
    found, setup = Runs(ROOT / "examples" / "reproduced" / "at-size.jsonl"), at_size.setup(*which)
    dense, ours = (at_size.ends(found, setup, system) for system in at_size.BOTH)
    best = at_size.best_rate(setup.model, dense)
    gaps = at_size.gaps(setup.model, ours[best], dense[best])
    text = " ".join((ROOT / "examples" / "guides" / page).read_text().split())
    assert words.format(mean(gaps), standard_error(gaps)) in text


def text_of(page: str) -> str:
    return " ".join((ROOT / page).read_text().split())


README, SETTINGS, EVIDENCE, SPEED, RESUME = map(
    text_of, ("README.md", *(f"examples/guides/{name}.md" for name in ("settings", "evidence", "speed", "resume")))
)
RUNS = ROOT / "examples" / "reproduced"


def gaps_in_the_loss(low: int, high: int) -> list[tuple[str, float, float]]:
    """All runs of ``saving=50`` of so many steps whose loss was compared: model, rate over dense's best, gap in %.

    The rates of ``saving-curves`` are factors of one that suits dense training. Other optimizers have their own table.
    """
    found = []
    for file in ("at-size", "lag"):
        runs = Runs(RUNS / f"{file}.jsonl")
        for setup in at_size.known(runs):
            dense, ours = (at_size.ends(runs, setup, system, "held") for system in at_size.BOTH)
            fits = low <= setup.steps <= high and setup.optimizer.startswith(("SGD", "AdamW"))
            if fits and dense and (file == "lag" or not at_size.COURSES[setup.model].images):
                best = min(dense, key=lambda rate: mean(dense[rate].values()))
                for rate in ours.keys() & dense.keys():
                    gaps = [
                        100 * (loss / dense[rate][seed] - 1) for seed, loss in ours[rate].items() if seed in dense[rate]
                    ]
                    found += [(setup.model, rate / best, mean(gaps))] if gaps else []
    runs = Runs(RUNS / "saving-curves.jsonl")
    for learner in saving_curves.LEARNERS:
        over = 3.0 if ", 3 lr" in learner.name else 1 / 3 if ", lr / 3" in learner.name else 1.0
        for steps in saving_curves.LENGTHS:
            if low <= steps <= high and learner.text and not re.search("not adapted|workers clip", learner.name):
                gaps = saving_curves.gaps(runs, learner, steps, 50)
                found += [(learner.model, over, mean(gaps))] if gaps else []
    return found


def test_ranges_in_sentences_cover_all_runs_that_fit():
    short, long = gaps_in_the_loss(300, 500), gaps_in_the_loss(1000, 3000)
    text, more = ([each for each in runs if each[0] != "convnet"] for runs in (short, long))
    worst = max(gap for _, rate, gap in text if rate <= 1), max(gap for _, rate, gap in text if rate > 1)
    later = max(gap for _, _, gap in more)
    images = [max(gap for name, _, gap in runs if name == "convnet") for runs in (short, long)]
    assert [round(rate) for _, rate, gap in text if gap == worst[1]] == [2]
    assert f"at most {worst[0]:.1f} % above DDP's ({worst[1]:.1f} % at twice the best rate)" in README
    assert f"after 1,000 to 3,000 steps at most {later:.1f} %." in README
    assert f"1,024 images per step the gaps are {images[0]:.1f} and {images[1]:.1f} %" in README
    assert f"losses are {-min(gap for _, _, gap in text):.1f} % below to {worst[0]:.1f} % above" in SETTINGS
    assert f"is {images[0]:.1f} % behind after 500 steps, and {images[1]:.1f} % after 1,000" in SETTINGS
    assert f"a convnet with large batches {images[0]:.1f} % after 500" in EVIDENCE


def test_sentences_on_fine_tuning_cover_all_runs():
    runs = Runs(RUNS / "fine-tuning.jsonl")

    def ranges(kind: str, *lengths: int, what: str = "saving 50") -> tuple[float, float]:
        rows = fine_tuning.table(runs, kind, lengths, [0, 1, 2])
        behind = [float(row[f"{what}, behind %"].split()[0]) for row in rows]
        return min(behind), max(behind)

    every = 100, 300, 1000
    adam, sgd = ranges("AdamW", *every), ranges("SGD", *every)
    least = max(ranges(kind, *every, what="saving 10")[1] for kind in ("AdamW", "SGD"))
    assert f"is at most {adam[1]:.1f} % behind dense training with AdamW, and {sgd[1]:.1f} % with SGD" in EVIDENCE
    assert f"`saving=10` at most {least:.1f} %" in EVIDENCE
    early, late = ranges("convnet", 100, 300), ranges("convnet", 1000)
    assert (
        f"{early[0]:.1f} to {early[1]:.1f} % behind after 100 and 300 steps with SGD, and {late[1]:.1f} %" in EVIDENCE
    )
    images, late = ranges("convnet, AdamW", 100, 300), ranges("convnet, AdamW", 1000)
    assert f"with AdamW {images[0]:.1f} to {images[1]:.1f} %, and {late[0]:.1f} to {late[1]:.1f} %" in EVIDENCE
    least = max(ranges(kind, *every, what="saving 10")[1] for kind in ("convnet", "convnet, AdamW"))
    assert f"`saving=10`: {least:.1f} % at most" in EVIDENCE
    assert f"at most {max(adam[1], sgd[1]):.1f} % behind (a convnet: {max(images[1], early[1]):.1f} %)" in README


def test_sentences_on_published_scripts_cover_all_runs():
    runs, page = Runs(RUNS / "scripts.jsonl"), text_of("examples/guides/scripts.md")
    rows = [row for row in scripts.table(runs) if "Adadelta" not in row["settings"]]
    worst = max(float(row["behind, %"].strip("*").split()[0]) for row in rows)
    assert f"All but Adadelta's end at most {worst:.1f} % behind" in page
    dense, ours = (runs[scripts.run_key("MNIST", system, 0)]["held"] for system in ("dense", "saving 10"))
    assert f"with `saving=10` {100 * (ours / dense - 1):.1f} % (seed 0)" in page


def test_figures_that_stand_in_the_readme_are_those_of_the_guides():
    timed = json.loads((RUNS / "bench-own-work-gpu.json").read_text())["tables"]["A step"]
    ms = {(row["model"], row["exchange"]): row["ms"] for row in timed}
    gpt, resnet = ([ms[name, how] for how in ("none", "saving=50")] for name in ("gpt2", "resnet50"))
    assert f"takes {gpt[0]:.1f} ms without an exchange and {gpt[1]:.1f} with `saving=50`" in SPEED
    (added,) = {f"{each[1] - each[0]:.1f}" for each in (gpt, resnet)}
    assert f"(64 images) {resnet[0]:.1f} and {resnet[1]:.1f}: {added} more for each" in SPEED
    assert f"Ours adds {float(added):.0f} ms of [the host's time]" in README
    fp16, ours = re.search(r"it takes ([\d to]+) s, ours ([\d to]+)\.", README).groups()
    local = re.search(r"post-local SGD takes ([\d to]+) s in the race", README)[1]
    for name, seconds in (("`saving=50`", ours), ("fp16 hook", fp16), ("local 50", local)):
        assert re.search(rf"\| {name} +\|[^|]*\| \d+ \({seconds}\)", (ROOT / "examples/guides/speed.md").read_text())
    (learner,) = (each for each in saving_curves.LEARNERS if each.name == "gpt2, AdamW")
    short = mean(saving_curves.gaps(Runs(RUNS / "saving-curves.jsonl"), learner, 300, 50))
    assert f"GPT-2 of Transformers is {short:.1f} % behind after 300" in SETTINGS
    assert f"GPT-2 is {short:.1f} % behind after 300 steps" in EVIDENCE
    (seeds,) = json.loads((RUNS / "first-script.json").read_text())["tables"].values()
    gaps = [row["saving=50, three buckets, behind %"] for row in seeds]
    behind = f"{mean(gaps):.1f} ± {standard_error(gaps):.1f}"
    assert f"{behind} in three buckets" in EVIDENCE
    assert f"In three, the usual GPT is {behind} % behind DDP after 300 steps" in SETTINGS
    settings, archive = (
        (ROOT / "examples" / page).read_text() for page in ("guides/settings.md", "reproduced/archive.md")
    )
    large = {(run["steps"], run["system"]): run["held"] for run in Runs(RUNS / "large-gpt-cpu.jsonl").values()}
    short, long = ((large[steps, "dense"], large[steps, "saving 50"]) for steps in (1000, 3000))
    early, late = (100 * (ours / dense - 1) for dense, ours in (short, long))
    assert f"ends at {early:.1f} % after 1,000 steps and {late:.1f} % after 3,000 (8 texts" in EVIDENCE
    assert "end at {:.3f} and {:.3f} after 1,000 steps, and at {:.3f} and {:.3f} after 3,000".format(
        *short, *long
    ) in text_of("examples/reproduced/archive.md")
    cells = {row.split("|")[1].strip(): row.split("|") for row in settings.splitlines() if row.startswith("| ")}
    muon, lion = (round(float(cells[name][5].split()[0])) for name in ("Muon", "Lion"))
    assert f"a GPT ends {muon} % behind with Muon, and {lion} % with Lion." in README
    power = re.search(r"\| PowerSGD 5 [^\n]*\| \+([\d.]+) \(1 seed", archive)[1]
    assert f"a GPT ends [{float(power):.0f} % behind]" in README
    (lost,) = set(re.findall(r"\| (?:tied )?gpt +\| [\d,]+ +\| [^|]*\| [^|]*\| \+([\d.]+ ± [\d.]+) \|\n", archive))
    assert f"costs a GPT {lost} % of its loss, with 300 steps as with 1,000" in RESUME
    assert f"cost {float(lost.split()[0]):.1f} % of the loss." in README


@pytest.mark.trainer
def test_the_first_lines_of_the_readme_train(tmp_path):
    """As written, but on one node."""
    (diff,) = blocks(ROOT / "README.md", "diff")
    quick = "devices=1, accelerator='cpu', max_steps=2, logger=False, enable_checkpointing=False"
    added = [line[2:].replace("num_nodes=4", quick) for line in diff.splitlines() if line.startswith("+ ")]
    assert quick in added[-1]
    code = [
        "import lightning as L, torch",
        "from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset",
        "model, data = BoringModel(), torch.utils.data.DataLoader(RandomDataset(32, 8), 4)",
        "before = model.layer.weight.clone()",
        *added,
        "trainer.fit(model, data)",
        "print((model.layer.weight != before).any().item())",
    ]
    path = tmp_path / "first.py"
    path.write_text("\n".join(code))
    assert script(path, log=tmp_path / "log", folder=tmp_path).rstrip().endswith("True")


PACKAGE = Path(lightning_topk.__file__).parent
FILES = [path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py")]
ELSEWHERE = re.compile(r"adapters/(fsdp|lightning)/|core/ops/(cuda|kernels)\.py")
"""Files that do not run on CPUs with DDP, which a list may name."""


def check_list(head: str, ran: set[str], before: set[str] = frozenset()) -> None:
    """Fails unless a list of CONTRIBUTING names all files that ran, and else only such as ran ``before``."""
    (text,) = re.findall(rf"^## {head}\n(.*?)^## ", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE | re.DOTALL)
    listed = set()
    for name in re.findall(r"`([\w/]+\.py)`", text):
        (file,) = [name] if name in FILES else [each for each in FILES if each.endswith(f"/{name}")]
        listed |= set() if ELSEWHERE.match(file) else {file}
    wrong = sorted(ran - listed), sorted(listed - ran - before)
    assert wrong == ([], []), f"{head}: files that run and are not named, and that are named and do not run: {wrong}"


@contextmanager
def traced() -> Iterator[set[str]]:
    """Collects the package's files of which a function runs meanwhile, in this thread or in one that starts."""
    found = set()

    def note(frame, event, _):
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            found.add(path.relative_to(PACKAGE).as_posix())

    for profiled in (threading, sys):
        profiled.setprofile(note)
    try:
        yield found
    finally:
        for profiled in (threading, sys):
            profiled.setprofile(None)


@pytest.mark.skipif(fast(torch.device("cpu")) is None, reason="the list names the files of numba's version")
@on_ranks(2)
def test_the_ways_of_a_gradient_and_of_a_residual_name_the_files_that_run(rank, world):
    def made():
        net = nn.Sequential(*[nn.Linear(300, 300) for _ in range(3)])
        optimizer = torch.optim.AdamW(net.parameters())
        return optimizer, *attached(net, {"bucket_cap_mb": 0.5}, saving=50, optimizer=optimizer)

    optimizer, model, _ = made()  # compiles: numba takes minutes while functions are traced
    for number in range(2):
        model(batch(rank, number, 300)).square().mean().backward()
        optimizer.step()
    optimizer, model, state = made()
    with traced() as step:  # the lane starts its thread here
        for number in range(4):
            step.clear()  # the files of the last one remain
            optimizer.zero_grad()
            model(batch(rank, number, 300)).square().mean().backward()
            optimizer.step()
    with traced() as moved:
        state.load_state_dict(shared(state.state_dict()))
    assert len(state.last_buckets) == 2
    check_list("The path of a gradient", step)
    check_list("The way of a residual", moved, step)


def test_the_way_of_a_setting_names_the_files_that_run():
    with traced() as found:
        plan_step(TopKConfig(saving=50).resolve(4, 1), [([90_000, 10_300], 4, (), 0)], 4)[0].codecs(0)
    check_list("The way of a setting", found)
