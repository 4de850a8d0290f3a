"""Adapters go out as PEFT has them: base and adapter are the merged checkpoint."""

import json

import numpy as np
import pytest
import safetensors.numpy

from tests.support import huggingface as golden
from tests.support.cases import some_by_hand
from tests.support.refusals import config_error, listed
from zjax.checkpoint.export import export_huggingface, export_peft
from zjax.checkpoint.store import Store
from zjax.errors import CheckpointError
from zjax.run.saving import save
from zjax.sharding import plan as plans

TOKENS = np.random.default_rng(0).integers(0, 60, (8, 9)).astype(np.int32)
BATCH = {"tokens": TOKENS[:, :-1], "targets": TOKENS[:, 1:]}
QUICK = ("optimizer.schedule.num_warmup_steps=0", "optimizer.peak_learning_rate=0.05")
LLAMA = [
    "mlp.down_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "self_attn.k_proj",
    "self_attn.o_proj",
    "self_attn.q_proj",
    "self_attn.v_proj",
]
BERT = [
    "attention.output.dense",
    "attention.self.key",
    "attention.self.query",
    "attention.self.value",
    "cls.predictions.transform.dense",
    "intermediate.dense",
    "output.dense",
]
CASES = {
    "bert-lora": ("bert", "lora", ".*", BERT, False),
    "llama-lora": ("llama", "lora", ".*", LLAMA, False),
    "llama-dora": ("llama", "dora", ".*", LLAMA, False),
    "gpt2-lora": ("gpt2", "lora", "/out|mlp/down", ["attn.c_proj", "mlp.c_proj"], True),
}


def trained(folder, family, *overrides, num_steps=2):
    run = golden.start(golden.make_config(family, *QUICK, *overrides))
    state = run.state
    for _ in range(num_steps):
        state, _ = run.step(state, BATCH)
    save(folder, state, run)
    return Store(str(folder))


def read_all(folder):
    files = folder.glob("*.safetensors")
    return {n: x for f in files for n, x in safetensors.numpy.load_file(f).items()}


@pytest.mark.parametrize("case", some_by_hand(CASES, {"llama-lora"}))
def test_base_with_adapters_is_the_merged_checkpoint(case, tmp_path):
    """Fails if a name, an order of dims, the factor or a length differs from PEFT's."""
    family, form, targets, modules, is_turned = CASES[case]
    settings = (f"lora.form={form}", f"lora.targets={targets}", "lora.alpha=6.0")
    store = trained(tmp_path / "run", family, "lora.rank=2", *settings)
    export_huggingface(store, str(tmp_path / "merged"))
    size = export_peft(store, str(tmp_path / "adapter"))
    assert size == sum(file.stat().st_size for file in (tmp_path / "adapter").iterdir())
    values = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    shown = ("peft_type", "r", "lora_alpha", "use_dora", "fan_in_fan_out")
    assert [values[n] for n in shown] == ["LORA", 2, 6.0, form == "dora", is_turned]
    assert values["target_modules"] == modules
    is_decoder = family not in golden.ENCODERS
    assert values["task_type"] == ("CAUSAL_LM" if is_decoder else None)
    base, merged = read_all(golden.FOLDER / family), read_all(tmp_path / "merged")
    adapter = read_all(tmp_path / "adapter")
    used = set()
    for name, weight in base.items():
        path = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{path}.lora_A.weight" in adapter:
            a, b = (adapter[f"{path}.lora_{x}.weight"] for x in "AB")
            used |= {f"{path}.lora_A.weight", f"{path}.lora_B.weight"}
            turned = weight.T if is_turned else weight
            total = turned + 3.0 * b @ a
            if form == "dora":
                used.add(f"{path}.lora_magnitude_vector")
                length = np.linalg.norm(total, axis=1, keepdims=True)
                total *= adapter[f"{path}.lora_magnitude_vector"][:, None] / length
            assert np.abs(total - turned).max() > 1e-3
            weight = total.T if is_turned else total
        np.testing.assert_allclose(merged[name], weight, rtol=1e-4, atol=1e-5)
    assert used == adapter.keys()


def test_adapters_of_blocks_that_are_offloaded_go_out(tmp_path, monkeypatch):
    """Fails if layers that are stored apart are left out in silence."""
    monkeypatch.setattr(plans, "MIN_MOVED_BYTES", 64)
    adapted, memory = ("lora.rank=2", "lora.targets=.*"), "pinned_host"
    offload = ("zero.stage=3", f"zero.offload.kind={memory}")
    offload += (f"zero.offload.parameter_memory={memory}",)
    for name, settings in {"apart": (*adapted, *offload), "stacked": adapted}.items():
        store = trained(tmp_path / name, "llama", *settings, num_steps=0)
        export_peft(store, str(tmp_path / f"{name}.peft"))
    found, expected = (read_all(tmp_path / f"{x}.peft") for x in ("apart", "stacked"))
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        np.testing.assert_array_equal(found[name], x)


REFUSED = listed("peft.txt")


@pytest.mark.parametrize("given", REFUSED)
def test_what_peft_cannot_hold_is_refused(given, tmp_path):
    """Fails if something that was trained is left out in silence."""
    family, *overrides = given.split("; ")
    store = trained(tmp_path / "run", family, *overrides, num_steps=0)
    with config_error(REFUSED[given]):
        export_peft(store, str(tmp_path / "adapter"))
    assert not (tmp_path / "adapter").exists()


def test_folder_with_files_stays_as_it_is(tmp_path):
    """Fails if an export overwrites another."""
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "notes.txt").write_text("mine")
    store = trained(tmp_path / "run", "llama", "lora.rank=2", num_steps=0)
    with pytest.raises(CheckpointError, match="exists and is not empty"):
        export_peft(store, str(tmp_path / "adapter"))
