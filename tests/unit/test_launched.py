"""What a launch config meant that does not say it: files without a version, and GPUs that are not there."""

import os
import warnings

import pytest
import torch

from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.integrations import launched
from hf_fsdp_tools.integrations.plugin import HybridFSDPPlugin

LAUNCHED = {
    "ACCELERATE_USE_FSDP": "true",
    "ACCELERATE_DYNAMO_USE_FULLGRAPH": "False",
    "FSDP_VERSION": "1",
    "FSDP_SHARDING_STRATEGY": "FULL_SHARD",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_FORWARD_PREFETCH": "false",
    "FSDP_BACKWARD_PREFETCH": "BACKWARD_PRE",
    "FSDP_USE_ORIG_PARAMS": "true",
    "FSDP_SYNC_MODULE_STATES": "true",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
}
"""Variables of `accelerate launch` for a file without fsdp_version."""


@pytest.fixture
def launch(monkeypatch):
    """The plugin of a process with these variables, and what was said."""
    for name in [*LAUNCHED, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"]:
        monkeypatch.delenv(name, raising=False)

    def make(**variables):
        for name, value in (LAUNCHED | variables).items():
            monkeypatch.setenv(name, value)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            plugin = HybridFSDPPlugin()
        return plugin, [str(each.message) for each in caught]

    return make


def test_a_file_without_a_version_is_read_as_fsdp2(launch):
    plugin, said = launch()
    assert (plugin.fsdp_version, plugin.reshard_after_forward, plugin.copies) == (2, True, None)
    (line,) = said
    assert "FULL_SHARD means reshard_after_forward=True; the rest means the same" in line
    assert "hf-fsdp config --from FILE" in line and "\n" not in line


def test_settings_of_fsdp1_alone_are_named_in_the_same_line(launch):
    plugin, (line,) = launch(
        FSDP_SHARDING_STRATEGY="2", FSDP_FORWARD_PREFETCH="true", FSDP_STATE_DICT_TYPE="LOCAL_STATE_DICT"
    )
    assert plugin.fsdp_version == 2 and plugin.reshard_after_forward is False
    assert plugin.state_dict_type.name == "SHARDED_STATE_DICT"
    assert "SHARD_GRAD_OP means reshard_after_forward=False; left out: forward_prefetch=True" in line


def test_one_rank_says_it(launch):
    assert launch(RANK="1", WORLD_SIZE="2", LOCAL_RANK="1", LOCAL_WORLD_SIZE="2")[1] == []


@pytest.mark.parametrize(("strategy", "reshard"), [("HYBRID_SHARD", True), ("HYBRID_SHARD_ZERO2", False)])
def test_a_hybrid_strategy_is_a_copy_per_machine(launch, strategy, reshard):
    ranks = {"RANK": "0", "WORLD_SIZE": "8", "LOCAL_RANK": "0"}
    plugin, (line,) = launch(**ranks, LOCAL_WORLD_SIZE="4", FSDP_SHARDING_STRATEGY=strategy)
    assert (plugin.copies.dp_replicate_size, plugin.copies.dp_shard_size) == (2, 4)
    assert plugin.reshard_after_forward is reshard and "in 2 copies, one per machine" in line
    assert launch(**ranks, LOCAL_WORLD_SIZE="8", FSDP_SHARDING_STRATEGY=strategy)[0].copies is None


def test_what_cannot_be_read_so_is_refused(launch):
    with pytest.raises(ConfigError, match=r"NO_SHARD\. Use Accelerate's MULTI_GPU"):
        launch(FSDP_SHARDING_STRATEGY="NO_SHARD")


def test_who_asks_for_fsdp1_gets_it(launch, monkeypatch):
    explicit = {"FSDP_RESHARD_AFTER_FORWARD": "full_shard", "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT"}
    plugin, said = launch(**explicit)
    assert plugin.fsdp_version == 1 and not any("read as FSDP2" in line for line in said)
    launch()  # as for a file without a version again
    monkeypatch.setenv("FSDP_STATE_DICT_TYPE", "SHARDED_STATE_DICT")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert HybridFSDPPlugin(fsdp_version=1).fsdp_version == 1
    monkeypatch.delenv("ACCELERATE_DYNAMO_USE_FULLGRAPH")
    assert launched.read_version(None) == (1, False), "set by hand, without the launcher"


@pytest.mark.parametrize("version", [3, 0, "two"])
def test_another_version_is_refused(version, monkeypatch):
    with pytest.raises(ConfigError, match=f"fsdp_version is {version}: use 2"):
        HybridFSDPPlugin(fsdp_version=version)
    monkeypatch.setenv("FSDP_VERSION", str(version))
    with pytest.raises(ConfigError, match=f"fsdp_version is {version}: use 2"):
        HybridFSDPPlugin()


def test_a_config_for_gpus_on_a_machine_without_is_refused(monkeypatch):
    monkeypatch.setattr(launched, "local_device", lambda: torch.device("cpu"))
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(ConfigError, match=r"is for GPUs.*finds none.*\(CUDA_VISIBLE_DEVICES is not set\)"):
        launched.check_gpus(cpu=False)
    launched.check_gpus(cpu=True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    launched.check_gpus(cpu=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.delenv("ACCELERATE_DYNAMO_USE_FULLGRAPH")
    launched.check_gpus(cpu=False)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"
