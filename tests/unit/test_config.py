"""Settings: what is accepted, what is refused, and in which words."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from shoal.config import Checked, CompareConfig, PlanConfig, TrainConfig, VerifyConfig, read_recipe
from shoal.errors import ConfigError
from shoal.machine import cores
from shoal.optimizers import GENTLER_RATES, OPTIMIZERS, Sgd
from shoal.zoo.by_name import names

SHARED = "model model_options data input classes batch seed workers plan batch_norm recompute factors timeout threads "
FLAGS = {
    TrainConfig: SHARED
    + "augment epochs init init_partial optimizer optimizer_options optimizer_state lr schedule warmup momentum "
    "weight_decay last_batch accumulate clip label_smoothing amp ema "
    "on replicas exchange exchange_options slow race "
    "bucket_bytes device out eval_every patience eval_steps checkpoint_every keep restarts elastic "
    "log_every tensorboard trace",
    VerifyConfig: SHARED + "steps dtype tolerance",
    CompareConfig: "plans exchanges workers replicas seeds baseline target rates rate_epochs rounds out",
}


@pytest.mark.parametrize("settings", FLAGS)
def test_settings_are_pinned(settings: type[Checked]) -> None:
    """A new setting is a decision: it becomes a flag, and of training a recipe's key and a line of config.yaml."""
    assert list(settings.model_fields) == FLAGS[settings].split()


@pytest.mark.parametrize("settings", FLAGS)
def test_every_setting_explains_itself(settings: type[Checked]) -> None:
    assert all(field.description for field in settings.model_fields.values())


def test_a_comparison_has_no_recipe_of_training() -> None:
    with pytest.raises(ConfigError, match="'epochs' is not a setting of a comparison"):
        VerifyConfig.parse({"epochs": 3})


def test_text_from_a_command_line_becomes_values() -> None:
    config = TrainConfig.parse({"epochs": "3", "lr": "1e-2", "input": "3,32,48", "out": "there"})
    assert (config.epochs, config.lr, config.input, config.out) == (3, 0.01, (3, 32, 48), Path("there"))


def test_auto_is_one_worker_per_core() -> None:
    assert TrainConfig.parse({"workers": "auto"}).workers == cores()


def test_an_optimizer_has_its_usual_rates_unless_they_are_given() -> None:
    assert [(c.lr, c.momentum, c.weight_decay) for c in map(_optimized, OPTIMIZERS)] == [
        (0.05, 0.9, 5e-4),
        (1e-3, 0.0, 0.0),
        (1e-3, 0.0, 0.01),
        (1e-3, 0.0, 0.0),
        (0.01, 0.0, 0.0),
    ]
    assert TrainConfig(optimizer="adamw").decided() == ["adamw with --lr 0.001 and --weight-decay 0.01."]
    assert TrainConfig(optimizer="adamw", lr=0.1, weight_decay=0).decided() == []
    assert TrainConfig().decided() == []


def test_networks_that_do_not_bear_the_usual_rate_have_a_lower_one() -> None:
    acoustic = TrainConfig(model="acoustic")
    assert acoustic.lr == 0.03
    assert acoustic.decided() == ["--lr 0.03, which acoustic bears, instead of 0.05."]
    assert TrainConfig(model="acoustic", lr=0.05).lr == 0.05
    assert TrainConfig(model="acoustic", lr=0.05).decided() == []
    assert TrainConfig(model="acoustic", optimizer="adam").lr == 0.001
    assert set(GENTLER_RATES) <= set(names())
    assert all(rate < Sgd.lr for rate in GENTLER_RATES.values())


def _optimized(name: Any) -> TrainConfig:
    return TrainConfig(optimizer=name)


def test_options_of_an_optimizer_are_numbers_whoever_gives_them() -> None:
    given = TrainConfig.parse({"optimizer": "adam", "optimizer_options": "betas=[0.9,0.95],eps=1e-6"})
    assert given.optimizer_options == {"betas": [0.9, 0.95], "eps": 1e-6}
    assert TrainConfig.parse(yaml.safe_load(given.to_yaml())) == given


@given(
    epochs=st.integers(1, 10**6),
    lr=st.floats(1e-9, 1e3),
    shape=st.none() | st.lists(st.integers(1, 4096), min_size=1, max_size=4).map(tuple),
    schedule=st.sampled_from(["cosine", "step", "constant"]),
    out=st.none() | st.just(Path("a folder/it")),
)
def test_yaml_reads_back_equal(epochs: int, lr: float, shape: Any, schedule: Any, out: Path | None) -> None:
    config = TrainConfig(epochs=epochs, lr=lr, input=shape, schedule=schedule, out=out)
    assert TrainConfig.parse(yaml.safe_load(config.to_yaml())) == config


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"epohcs": 3}, ["'epohcs'", "Did you mean 'epochs'"]),
        ({"epochs": "three"}, ["epochs = 'three'", "Passes over the training set"]),
        ({"epochs": 0}, ["epochs = 0", "greater than 0"]),
        ({"lr": "nan"}, ["lr = 'nan'", "finite"]),
        ({"schedule": "sine"}, ["schedule = 'sine'", "'cosine'"]),
        ({"momentum": 1}, ["momentum = 1", "less than 1"]),
        ({"input": "3,x"}, ["input", "integer"]),
        ({"input": "3,0,4"}, ["input", "greater than 0"]),
        ({"model_options": "width"}, ["model_options = 'width'", "name=value"]),
        ({"workers": 0}, ["workers = 0", "greater than 0"]),
        ({"workers": "many"}, ["workers = 'many'", "auto is one per core"]),
        ({"timeout": "0"}, ["timeout = '0'", "greater than 0"]),
        ({"recompute": "perhaps"}, ["recompute = 'perhaps'", "boolean"]),
        ({"warmup": 5, "epochs": 5}, ["warmup = 5", "epochs = 5"]),
        ({"init_partial": True}, ["init_partial", "--init"]),
        ({"optimizer": "adm"}, ["optimizer = 'adm'", "'adamw'"]),
        ({"optimizer": "adam", "momentum": 0.5}, ["momentum = 0.5 is not for adam", "--optimizer-options"]),
        ({"optimizer": "adam", "optimizer_options": "beta=0.9"}, ["'adam' has no option 'beta'", "'betas'"]),
        ({"optimizer": "adam", "optimizer_options": "betas=0.9"}, ["betas = 0.9", "betas=[0.9,0.999]"]),
        ({"optimizer": "rmsprop", "optimizer_options": "alpha=1"}, ["alpha = 1", "less than 1"]),
        ({"optimizer_options": "lr=1"}, ["lr is a setting of its own", "--lr"]),
        ({"optimizer_state": "cut", "replicas": 2, "workers": 2}, ["optimizer_state = 'cut'", "allreduce"]),
        ({"optimizer_options": "nesterov=true", "momentum": 0}, ["nesterov = true", "momentum = 0", "above 0"]),
    ],
)
def test_refusals_name_the_value_and_the_remedy(values: dict[str, Any], named: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        TrainConfig.parse(values, source="recipe 'r.yaml': ")
    assert caught.value.remedy
    for word in named:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("epochs: [1", ["line 1", "not YAML"]),
        ("a: 1\n  b: 2", ["line 2", "not YAML"]),
        ("- 1\n- 2", ["list", "names and values"]),
        ("just words", ["str"]),
    ],
)
def test_a_recipe_that_is_none(tmp_path: Path, text: str, named: list[str]) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_recipe(path)
    for word in [*named, "recipe.yaml"]:
        assert word in str(caught.value)


@pytest.mark.parametrize("values", [{"epoch": 3}, {"epochs": -3}, {"lr": "fast"}], ids=str)
def test_settings_made_in_python_are_refused_in_the_same_words(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as read:
        TrainConfig.parse(values)
    with pytest.raises(ConfigError) as made:
        TrainConfig(**values)
    assert str(made.value) == str(read.value)


@pytest.mark.parametrize(
    ("given", "workers", "replicas", "batch", "told"),
    [
        ({"workers": 2, "exchange": "downpour"}, 2, 2, 64, []),
        ({"workers": 2, "replicas": 1, "exchange": "downpour"}, 2, 1, 64, ["exchanges nothing: give --replicas"]),
        ({"exchange": "gossip"}, 1, 1, 64, ["gossip with one replica exchanges nothing"]),
        ({"replicas": 3}, 3, 3, 63, ["--batch 63, which 3 replicas can share equally, instead of 64"]),
        ({"replicas": 4, "exchange": "backup"}, 4, 4, 63, ["--batch 63"]),
        ({"replicas": 100, "exchange": "local"}, 100, 100, 100, ["--batch 100"]),
        ({"workers": 6, "replicas": 3, "batch": 9}, 6, 3, 9, []),
        ({"workers": 2}, 2, 1, 64, []),
    ],
    ids=str,
)
def test_what_is_not_given_fits_what_is(
    given: dict[str, Any], workers: int, replicas: int, batch: int, told: list[str]
) -> None:
    config = TrainConfig.parse(given)
    assert (config.workers, config.replicas, config.batch) == (workers, replicas, batch)
    assert len(config.decided()) == len(told)
    assert all(words in line for words, line in zip(told, config.decided(), strict=True))
    assert TrainConfig.parse(yaml.safe_load(config.to_yaml())) == config  # as a resumed run reads it


def test_on_other_workers_what_was_not_given_is_decided_anew() -> None:
    assert TrainConfig(exchange="downpour").on_workers(3).replicas == 3
    assert TrainConfig(exchange="downpour", workers=4, replicas=2).on_workers(6).replicas == 2


def test_a_batch_that_was_given_must_be_shared_equally() -> None:
    with pytest.raises(ConfigError, match="batch = 64 is not divided evenly by 3 replicas"):
        TrainConfig(replicas=3, batch=64)


def test_memory_is_a_number_of_bytes() -> None:
    with pytest.raises(ConfigError, match=r"memory = 'lots' does not work: it should be a number of bytes, alone or"):
        PlanConfig.parse({"memory": "lots"})


def test_recipes_may_be_empty_and_use_dashes(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("")
    assert read_recipe(path) == {}
    path.write_text("weight-decay: 5e-4\n")
    assert TrainConfig.parse(read_recipe(path)).weight_decay == 5e-4
