"""Training on prepared examples: margins, references, resuming and rewards."""

import gc
import json
import shutil
import types

import jax
import numpy as np
import pytest

import zjax
from tests.support import small_run
from tests.support.command_line import typed
from tests.support.refusals import config_error
from zjax import rl
from zjax.cli import main
from zjax.config.load import load_config
from zjax.data.prepare import prepare
from zjax.run import bench
from zjax.settings.mappings import to_mapping

VOCAB = "abcdefgh"


def write(folder, kind="pairs", number=160):
    """Prepares completions, of which those that repeat the prompt are better."""
    rng, records = np.random.default_rng(0), []
    for n in range(number):
        prompt = "".join(rng.choice([*VOCAB], 3))
        good, bad = prompt, "".join(rng.choice([*VOCAB], 3))
        if kind == "pairs":
            record = {"chosen": good + "!", "rejected": bad + "."}
        elif kind == "ranked":
            record = {"completions": [good + "!", prompt[0] + bad[1:] + ".", bad + "?"]}
        else:
            record = {"completion": (bad, good)[n % 2] + ".!"[n % 2], "label": n % 2}
        records.append({"prompt": prompt + "=", **record})
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{kind}.jsonl"
    path.write_text("\n".join(map(json.dumps, records)))
    prepare(
        [path],
        folder / kind,
        tokenizer="bytes",
        examples=kind,
        validation_fraction=0.2,
    )
    return folder / kind


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write(tmp_path_factory.mktemp("data"))


def make_config(directory, data, kind, *changes):
    return load_config(
        small_run.SETTINGS,
        {
            "directory": str(directory),
            "preference": kind,
            "num_steps": 30,
            "global_batch_size": 8,
            "zero.stage": 1,
            "optimizer.peak_learning_rate": 3e-3,
            "model.vocab_size": 257,
            "model.max_length": 48,
            "model.dropout_rate": 0.0,
            "model.tied_head": False,
            "data.source": "tokens",
            "data.path": str(data),
            "data.length": 48,
            "data.packing": "documents",
            "evaluation.num_batches": -1,
        },
        *changes,
    )


def trainer_of(*args, num_devices=2):
    config = make_config(*args)
    return rl.PreferenceTrainer(config, devices=jax.devices()[:num_devices])


def fit(*args, **options):
    trainer = trainer_of(*args, **options)
    before = trainer.evaluate()
    trainer.fit()
    after = trainer.evaluate()
    trainer.close()
    return before, after, trainer


def test_dpo_raises_the_margin_of_held_out_pairs(data, tmp_path):
    before, after, _ = fit(tmp_path, data, "dpo")
    # The run starts from the reference: nothing is preferred yet.
    np.testing.assert_allclose(before["eval_margin"], 0, atol=1e-5)
    np.testing.assert_allclose(before["eval_loss"], np.log(2), rtol=1e-5)
    assert after["eval_loss"] < before["eval_loss"] - 0.1
    assert after["eval_margin"] > 0.3 and after["eval_accuracy"] > 0.9


def texts_of(opened):
    """The documents of a split, as texts that a policy could have drawn."""
    for start, end in zip(opened.offsets[:-1], opened.offsets[1:], strict=True):
        ids, answers = opened.tokens[start:end], opened.answers[start:end]
        first = int(answers.argmax())
        logprobs = np.zeros(len(ids) - first, np.float32)
        given = {
            "prompt_ids": ids[:first].tolist(),
            "ids": ids[first:].astype(np.int32),
        }
        yield types.SimpleNamespace(**given, logprobs=logprobs, experts=None)


@pytest.mark.parametrize("kind", ["pairs", "ranked"])
def test_a_reward_model_ranks_held_out_completions(kind, data, tmp_path):
    data = data if kind == "pairs" else write(tmp_path / "data", kind)
    changes = {"num_steps": 20, "optimizer.peak_learning_rate": 1e-2}
    before, after, trainer = fit(tmp_path / "run", data, "reward_model", changes)
    # The vector of rewards starts at 0.
    np.testing.assert_allclose(before["eval_loss"], np.log(2), rtol=1e-6)
    assert before["eval_accuracy"] == 0
    assert after["eval_accuracy"] > 0.9 and after["eval_margin"] > 0.5
    # As a judge of texts, the saved run gives the rewards that it was trained to.
    opened = trainer._examples["validation"].opened
    judge = rl.RewardRun(str(tmp_path / "run"), trainer.run)
    scores = np.array(judge.score([*texts_of(opened)]))
    lists = np.split(scores, opened.examples[1:-1])
    means = [each.mean() for each in lists]
    np.testing.assert_allclose(np.mean(means), after["eval_reward"], rtol=1e-4)


def steps_of(config, number, **options):
    """The metrics of the first steps of a run."""
    trainer = rl.PreferenceTrainer(config, devices=jax.devices()[:2], **options)
    found = []
    with trainer.loader as batches:
        for _ in range(number):
            trainer.state, metrics = trainer.run.step(trainer.state, next(batches))
            found.append({name: float(x) for name, x in metrics.items()})
    trainer.close()
    return found, trainer


def test_kto_learns_from_labels_whatever_the_microbatches(data, tmp_path):
    """Fails if the divergence is a mean over a microbatch: the losses then differ."""
    labels = write(tmp_path / "data", "labels")
    found = []
    for number in (1, 4):
        changes = {"num_microbatches": number, "preference.beta": 0.5}
        config = make_config(tmp_path / str(number), labels, "kto", changes)
        found.append(steps_of(config, 6)[0])
    first = found[0]
    for name in ("loss", "divergence", "margin", "grad_norm"):
        one, other = ([step[name] for step in steps] for steps in found)
        np.testing.assert_allclose(one, other, rtol=2e-3, atol=1e-5)
    assert first[0]["divergence"] == pytest.approx(0, abs=1e-4)
    assert abs(first[-1]["divergence"]) > 1e-3
    assert first[-1]["loss"] < first[0]["loss"] - 0.01


def test_the_loss_of_kto_reads_the_divergence_of_the_step(tmp_path):
    """A reference that is 3 below the model everywhere: nothing is ahead of the mean.

    Fails if the divergence is 0, or that of another step.
    """
    labels = write(tmp_path / "data", "labels", number=40)
    changes = {"evaluation.num_batches": 0, "preference.desirable_weight": 3.0}
    config = make_config(tmp_path, labels, "kto", changes)
    _, trainer = steps_of(config, 0)
    with trainer.loader as batches:
        batch = dict(next(batches))
    batch["reference_logprobs"] -= 3.0 * (batch["examples"] > 0)
    is_desirable = np.asarray(batch["desirable"])[
        np.asarray(batch["examples"])[..., 0] > 0
    ]
    expected = 0.5 * np.where(is_desirable, 3.0, 1.0).mean()
    for metrics in (
        trainer.run.evaluate(trainer.state, batch),
        trainer.run.step(trainer.state, batch)[1],
    ):
        assert float(metrics["divergence"]) == pytest.approx(3, abs=1e-4)
        assert float(metrics["loss"]) == pytest.approx(expected, abs=1e-5)


def oracle(trainer, rows):
    """Log-probability of each completion, in a row of its own."""
    opened = rows.opened
    spans = [*zip(opened.offsets[:-1], opened.offsets[1:], strict=True)]
    tokens = np.zeros((len(spans), 48), np.int32)
    for row, (start, end) in zip(tokens, spans, strict=True):
        row[: end - start] = opened.tokens[start:end]
    with jax.set_mesh(trainer.run.mesh):
        module = trainer.run.bind(trainer.run.state)
        logits = jax.jit(module)(tokens)
    logprobs = np.asarray(jax.nn.log_softmax(logits), np.float64)
    sums = []
    for row, (start, end) in enumerate(spans):
        places = np.flatnonzero(opened.answers[start:end])
        sums.append(logprobs[row, places - 1, tokens[row, places]].sum())
    return np.array(sums)


def test_a_reference_is_computed_once(tmp_path, monkeypatch, caplog):
    """Compares it with each completion alone; equal weights read what is stored."""
    data = write(tmp_path / "data", number=40)
    config = make_config(tmp_path / "run", data, "ipo")
    _, trainer = steps_of(config, 0)
    rows, sums = trainer._examples["train"], trainer._sums["train"]
    np.testing.assert_allclose(sums, oracle(trainer, rows), rtol=1e-5)
    [stored] = data.glob("train.reference-*")
    computed = []
    compute = rl.preference_trainer.compute_sums

    def count(run, state, rows):
        computed.append(len(rows))
        return compute(run, state, rows)

    monkeypatch.setattr(rl.preference_trainer, "compute_sums", count)
    # Other settings of the run, a mesh among them, are no other reference.
    four = jax.devices()[:4]
    again = rl.PreferenceTrainer(config, devices=four)
    np.testing.assert_array_equal(again._sums["train"], sums)
    assert computed == []
    other = make_config(tmp_path / "other", data, "dpo", {"seed": 1})
    rl.PreferenceTrainer(other, devices=four).close()
    assert len(computed) == 2 and len([*data.glob("train.reference-*")]) == 2
    assert "1 other references are stored" in caplog.text
    content = bytearray(stored.read_bytes())
    content[-1] ^= 1
    stored.write_bytes(content)
    rl.PreferenceTrainer(config, devices=four).close()
    assert len(computed) == 3 and "is damaged" in caplog.text


def test_a_run_goes_on_bit_for_bit_and_finds_its_reference(tmp_path, caplog):
    """The resumed run starts from the reference again if what was stored is gone."""
    data = write(tmp_path / "data", number=40)
    changes = {"num_steps": 5, "evaluation.num_batches": 0}
    config = make_config(tmp_path / "whole", data, "dpo", changes)
    whole = rl.PreferenceTrainer(config, devices=jax.devices()[:2])
    whole.fit()
    whole.close()
    config = make_config(tmp_path / "parts", data, "dpo", changes)
    _, stopped = steps_of(config, 0)
    with stopped.loader as batches:
        for _ in range(3):
            stopped.state, _ = stopped.run.step(stopped.state, next(batches))
        stopped.save()
    stopped.close()
    [stored] = data.glob("train.reference-*")
    content = stored.read_bytes()
    stored.unlink()
    resumed = rl.PreferenceTrainer(config, devices=jax.devices()[:2])
    assert "are computed again" in caplog.text
    assert stored.read_bytes() == content
    resumed.fit()
    resumed.close()
    small_run.assert_equal(resumed, whole)


def test_a_reference_adds_no_bytes_of_weights(data, tmp_path):
    """Fails if a copy of the weights stays, on devices or as constants of a step."""
    sizes = []
    for kind in ("simpo", "dpo"):
        gc.collect()
        before = sum(x.nbytes for x in jax.live_arrays())
        config = make_config(tmp_path / kind, data, kind)
        trainer = rl.PreferenceTrainer(config, devices=jax.devices()[:2])
        gc.collect()
        held = sum(x.nbytes for x in jax.live_arrays()) - before
        example = trainer._example()
        analysis = trainer.run.step.compile(example).memory_analysis()
        added = sum(
            np.prod(x.shape) * x.dtype.itemsize
            for name, x in example.items()
            if name == "reference_logprobs"
        )
        read = analysis.argument_size_in_bytes - added / 2  # of one device
        sizes.append((held, read, analysis.generated_code_size_in_bytes))
        trainer.close()
        del trainer
    (held, read, _), (with_reference, reads, _) = sizes
    weights = 4 * 257 * 16  # the smaller of two matrices of the vocabulary
    assert with_reference - held < weights / 8
    assert reads == pytest.approx(read, abs=64)


def test_objectives_and_trainers_that_do_not_fit_are_refused(data, tmp_path):
    with config_error(
        "preference='dpo' is not read by zjax.Trainer; use zjax train, or "
        "zjax.rl.PreferenceTrainer"
    ):
        zjax.Trainer(make_config(tmp_path, data, "dpo"))
    with config_error(
        "preference='dpo' is not measured by zjax bench, whose batches are texts; "
        "leave it out"
    ):
        bench.measure(make_config(tmp_path, data, "dpo"))
    with config_error(
        "preference=None compares no completions; choose an objective, such as dpo, "
        "or use zjax.Trainer"
    ):
        rl.PreferenceTrainer(make_config(tmp_path, data, None))


def test_commands_train_and_evaluate_the_objective(data, tmp_path, capsys):
    changes = {"num_steps": 2, "data.num_workers": 0, "evaluation.num_batches": 1}
    config = make_config(tmp_path / "run", data, "orpo", changes)
    file = tmp_path / "config.py"
    file.write_text(f"def get_config():\n    return {to_mapping(config)!r}\n")
    main.train(typed("train", f"--config={file}", "--prompt=abc="))
    assert "sample:" in capsys.readouterr().out
    main.evaluate(typed("evaluate", f"--run={tmp_path / 'run'}"))
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["step"] == 2 and 0 <= found["eval_accuracy"] <= 1
    assert "eval_perplexity" not in found
    with config_error(
        "preference='dpo' reads a reference, and the saved run had none; start a new "
        "run, from its weights by checkpoint.init_from"
    ):
        rl.PreferenceTrainer(make_config(tmp_path / "run", data, "dpo", changes))


def test_evaluation_computes_a_lost_reference_from_the_start(tmp_path, capsys):
    """Fails if the reference is of random weights, or the start is read in vain."""
    data = write(tmp_path / "data", number=40)
    changes = {"num_steps": 1, "seed": 1, "optimizer.schedule.num_warmup_steps": 0}
    _, first = steps_of(make_config(tmp_path / "first", data, "orpo", changes), 1)
    first.save()
    first.close()
    changes |= {"checkpoint.init_from": str(tmp_path / "first"), "seed": 2}
    _, trained = steps_of(make_config(tmp_path / "run", data, "dpo", changes), 1)
    trained.save()
    trained.close()
    # Named by the weights; the numbers depend on the number of devices.
    stored = {*data.glob("*.reference-*")}
    for path in stored:
        path.unlink()

    def evaluate():
        main.evaluate(typed("evaluate", f"--run={tmp_path / 'run'}"))
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    found = evaluate()
    assert {*data.glob("*.reference-*")} == stored
    shutil.rmtree(tmp_path / "first")
    assert evaluate() == found
