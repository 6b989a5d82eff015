"""FSDP1 as Accelerate runs it: settings that it would honour wrongly, and generation through its wrapper."""

from typing import Any

from torch.distributed.fsdp import FullyShardedDataParallel

from hf_fsdp_tools.errors import ConfigError


def check_settings(plugin: Any, *, on_cpu: bool, alone_on_node: bool) -> None:
    """Refuse settings that FSDP1 silently honours wrongly, or crashes with.

    Sources: pytorch issue 154888 for hybrid strategies; the others by running them with torch 2.13 on CPUs.
    """
    strategy = plugin.sharding_strategy or plugin.reshard_after_forward
    problems = []
    if getattr(strategy, "name", "").upper().startswith(("HYBRID", "_HYBRID")) and (on_cpu or alone_on_node):
        problems.append(
            f"sharding strategy {strategy.name} with one device per node stops averaging gradients. Use FULL_SHARD, "
            "or FSDP2 with dp_replicate_size"
        )
    if on_cpu and "FULL" in str(plugin.state_dict_type):
        problems.append("state_dict_type FULL_STATE_DICT crashes the process on CPUs. Use SHARDED_STATE_DICT, or FSDP2")
    if on_cpu and getattr(plugin.cpu_offload, "offload_params", False):
        problems.append("CPU offload needs an accelerator to offload from. Set it to False")
    if problems:
        raise ConfigError("FSDP1: " + "; ".join(problems) + ".")


def let_generate(model: FullyShardedDataParallel) -> None:
    """Let an FSDP1 model generate: gather its root unit for the call; blocks gather themselves.

    FSDP1's wrapper hands `generate` to the module below it. The unit of that module (embeddings, head) is then not
    gathered, and the call fails with "'weight' must be 2-D".
    """
    generate = getattr(model.module, "generate", None)
    if generate is None:
        return

    def gathered_generate(*args: Any, **kwargs: Any) -> Any:
        with FullyShardedDataParallel.summon_full_params(model, recurse=False, writeback=False):
            return generate(*args, **kwargs)

    model.generate = gathered_generate  # type: ignore[assignment]  # found before the wrapper looks below
