"""Inner names that tests of several rooms need, once. A test imports public names (`hf_fsdp_tools`, its `steps`,
`testing`, `errors` and `scripting`), names of its own room, and from here, where each is imported when it is asked for.
A redesign that moves or renames one changes this table, and no test."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any
from unittest.mock import patch

NAMES = {
    "accelerator": "available_bytes peak_bytes side_stream_for",
    "axes": "AXES",
    "cli.launch": "named_config recipes",
    "cli.main": "main",
    "cli.presets": "Preset",
    "diagnostics.diagnosis": "Diagnosis",
    "diagnostics.environment": "check_environment rehearse",
    "diagnostics.findings": "Finding",
    "distributed.agreement": "agreed all_ranks wait_for_all_ranks",
    "distributed.cpu_backend": "timeout_of",
    "distributed.liveness": "Lookout",
    "distributed.mesh": "Axes axes_of local_device mesh_of pinned_bytes",
    "distributed.rounds": "Rounds rounds_of_thread",
    "distributed.shards": "Box Held local_boxes",
    "distributed.steps": "Step at_steps",
    "doors": "FEATURES",
    "extensions.float8": "Float8Layer float8_layers",
    "extensions.fsdp1": "hybrid_auto_wrap_policy load_weights_fsdp1 wrap_fsdp1",
    "extensions.fsdp1.flat_shards": "plain_view",
    "extensions.muon.muon": "MUON",
    "extensions.muon.owners": "matrices_in",
    "extensions.readers": "KEYS Reads",
    "extensions.rows": "Rows of_tokens",
    "extensions.streamed": "steps_in_backward",
    "extensions.tensor_parallel": "checked_rules",
    "foresight.events": "Alloc Event EventWriter Free Gradient Mark Parameter TensorSize Trace Work",
    "foresight.forecast": "build step_of",
    "foresight.fsdp2.step": "compose",
    "foresight.memory": "MARGIN",
    "foresight.recommend": "Cost EVERY GAIN ON_HOST recommend_config",
    "foresight.setup": "DTYPES",
    "foresight.throughput": "ThroughputEstimate step_time throughput_of",
    "foresight.timing.efficiency": "efficiency_of",
    "foresight.timing.hardware": "GPUS gpu_named",
    "foresight.tracing.dry_run": "trace_model",
    "foresight.tracing.recorder": "Recorder",
    "integrations.accelerate_launch": "split_words",
    "integrations.accelerator": "ShardedAccelerator ShardedScaler",
    "integrations.settings": "OWN_KEYS SETTINGS TRAINING_KEYS VARIABLES YAML_KEYS",
    "integrations.model": "check_managed hand_over",
    "integrations.checkpoints": "TRAINER_GLOBS _problem_of_state last_complete problem_of rotate",
    "integrations.resume": "AVERAGES refuse_damage using_format",
    "integrations.state": "start_state",
    "integrations.training_arguments": "plugin_arguments",
    "integrations.trl": "pack_full",
    "loading.conversion": "persistent_tensors",
    "loading.fill": "read_into",
    "loading.formats.dcp": "METADATA check_dcp parse_dcp",
    "loading.formats.pickled": "parse_pickled",
    "loading.formats.stored": "Stored StoredTensor",
    "loading.heads": "WithHeads",
    "loading.index": "CheckpointIndex",
    "loading.io.files": "MAX_GAP_BYTES Reader TransferStats Writer write_transfers",
    "loading.io.transfer": "Transfer",
    "loading.quantized.by_config": "keep_by_config",
    "loading.quantized.recognize": "with_floats",
    "loading.regions": "row_major_strides",
    "loading.report": "LoadReport MemoryWatch",
    "loading.symbolic": "PieceTensor",
    "modeling.codecs.table": "CODECS",
    "modeling.codecs.compressed": "matches",
    "modeling.codecs.fp8": "in_fp32 quantize",
    "modeling.configs": "save_tokenizer write_older_keys",
    "modeling.four_bits": "beside_4bit weights_4bit",
    "modeling.initialize": "initialize_missing",
    "modeling.module_tree": "ModuleTree replaced",
    "modeling.packed": "Packed packed_parameters",
    "modeling.packed_weight": "PackedForm PackedPart",
    "modeling.patterns": "matched",
    "modeling.pickles": "load_pickled",
    "planning.plan": "WrapUnit",
    "planning.rules": "check_wrap_plan",
    "pretrained": "open_checkpoint",
    "proof.batches": "candidates",
    "proof.case": "build=build_case telling tiny_case with_adapter with_kinds",
    "proof.compare": "load_sharded",
    "proof.plain": "Case PRECISIONS Tensors evaluate forward loss_of plain_figures",
    "proof.rounding": "MULTIPLE",
    "proof.run": "Proof WORDS",
    "proof.shrink": "shrink",
    "saving.hidden_folder": "Folder=HiddenFolder",
    "saving.manifest": "MANIFEST UNFINISHED check_sums read_manifest write_manifest",
    "saving.publish": "SaveReport",
    "saving.states": "StateFolder",
    "scripting.arguments": "_Parser",
    "scripting.data": "share_of_stream",
    "scripting.demo": "demo_rows make_demo_model train_demo_tokenizer",
    "scripting.recipes": "RECIPES commands_of",
    "scripting.setups": "recipe_words setup_of",
    "sharding.allocate": "allocate",
    "sharding.checks": "check_kind",
    "sharding.fsdp2_internals": "FSDP2_NAMES names_in refuse_without",
    "sharding.phases": "Hook Installed Phase Undo describe_hooks install remove_hooks",
    "sharding.recompute": "Recompute as_recompute",
    "sharding.replicated": "WholeGradient clip_norm step_kinds_apart",
    "sharding.shard": "ALWAYS apply_sharding checkpoint_activations",
    "sharding.sharding": "Feature Sharded Sharding sharding_of",
    "streaming.exchange": "gather_to_first",
    "streaming.held": "Part",
    "streaming.live": "LiveWeights",
    "streaming.routes": "plan_buckets",
    "text": "show_bytes",
}
"""By the module that has them; `NAME=OTHER` is OTHER in tests."""

_HOMES = {
    name.split("=")[-1]: (module, name.split("=")[0]) for module, names in NAMES.items() for name in names.split()
}


PATCHED = {
    "accelerator": "device_title",
    "cli.launch": "_run",
    "cli.options": "FIRST_S",
    "diagnostics.environment": "rehearse requires",
    "distributed.agreement": "available_bytes",
    "distributed.liveness": "_BEAT_S",
    "foresight.recommend": "recommend_config",
    "integrations.accelerate_launch": "launch",
    "integrations.resume": "check_dcp",
    "loading.conversion": "persistent_tensors",
    "loading.fill": "LEAST_RUN persistent_tensors read_into",
    "loading.io.files": "MAX_GAP_BYTES",
    "loading.load": "initialize_missing",
    "loading.match": "persistent_tensors",
    "loading.quantized.four_bits": "weights_4bit",
    "modeling.codecs.fp8": "in_fp32",
    "modeling.packed_weight": "VALUES_AT_A_TIME",
    "modeling.patterns": "_MATCH_S",
    "pretrained": "load_weights",
    "proof.run": "prove",
    "saving.hidden_folder": "_APPEARS_S",
    "scripting.setups": "device_title rank_on_node",
    "sharding.fsdp2_internals": "pinned_empty",
    "sharding.sharding": "runs_documents",
    "streaming.held": "_MIN_PART_BYTES",
}
"""What tests of other rooms put in place of something, by the module that looks it up there."""


def owners_of(name: str) -> list[Any]:
    """The modules that look up an inner name."""
    found = [import_module(f"hf_fsdp_tools.{module}") for module, names in PATCHED.items() if name in names.split()]
    assert found, f"no module of PATCHED has {name}"
    return found


@contextmanager
def patched(**values: Any) -> Iterator[None]:
    """A block in which inner names are something else."""
    with ExitStack() as stack:
        for name, value in values.items():
            for owner in owners_of(name):
                stack.enter_context(patch.object(owner, name, value))
        yield


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"tests/api.py has no {name}")
    module, own = _HOMES[name]
    return getattr(import_module(f"hf_fsdp_tools.{module}"), own)
