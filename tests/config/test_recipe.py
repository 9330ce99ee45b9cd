import textwrap
from dataclasses import dataclass, field
from pathlib import Path

import ml_collections
import pytest

from docs.generate.recipes import RECIPES
from jaxrl.config import (
    AlgorithmConfig,
    SamplingParams,
    TrainConfig,
    default_config,
    load_config_file,
    make_config,
    recipe as recipe_module,
    to_train_config,
)


@pytest.fixture
def recipe(tmp_path):
    def write(text):
        path = tmp_path / "recipe.py"
        path.write_text(textwrap.dedent(text))
        return str(path)

    return write


def test_default_config_is_the_schema():
    assert isinstance(default_config(), ml_collections.ConfigDict)
    assert to_train_config(default_config()) == TrainConfig()


def test_default_config_rejects_misspelt_names_and_wrong_types():
    config = default_config()
    with pytest.raises(AttributeError, match="sed"):
        config.trainer.sed = 1
    with pytest.raises(AttributeError, match="my_new_group"):
        config.my_new_group = 1
    with pytest.raises(TypeError, match="seed"):
        config.trainer.seed = "one"


def test_dict_fields_take_new_keys_and_unions_take_every_member():
    config = default_config()
    config.trainer.algorithm.policy_loss_kwargs.beta = 0.1
    config.generator.chat_template_kwargs = {"enable_thinking": False}
    config.generator.inference_engine.engine_init_kwargs.steps_per_dispatch = 8
    config.generator.eval_sampling_params = {"temperature": 0.6}
    config.generator.sampling_params.logprobs = None
    config.trainer.logger = ["console", "tensorboard"]
    config.trainer.algorithm.max_seq_len = 64
    config.trainer.policy.optimizer_config.lr = 1
    config.data.train_data = ("a", "b")
    result = to_train_config(config)
    assert result.trainer.algorithm.policy_loss_kwargs == {"beta": 0.1}
    assert result.generator.chat_template_kwargs == {"enable_thinking": False}
    assert result.generator.inference_engine.engine_init_kwargs == {"steps_per_dispatch": 8}
    assert result.generator.eval_sampling_params == SamplingParams(temperature=0.6)
    assert result.generator.sampling_params.logprobs is None
    assert result.trainer.logger == ["console", "tensorboard"]
    assert result.trainer.algorithm.max_seq_len == 64
    assert result.trainer.policy.optimizer_config.lr == 1.0
    assert result.data.train_data == ["a", "b"]


def test_what_ml_collections_lets_through_is_checked_on_conversion():
    config = default_config()
    config.trainer.max_training_steps = "ten"
    with pytest.raises(ValueError, match=r"trainer.max_training_steps='ten': expected int \| None"):
        to_train_config(config)


def test_fields_that_are_set_one_by_one_are_checked():
    config = TrainConfig()
    with pytest.raises(AttributeError, match="'eps_clip_hihg'. Did you mean 'eps_clip_high'"):
        config.trainer.algorithm.eps_clip_hihg = 0.28
    config.trainer.algorithm.eps_clip_high = "0.28"  # as YAML has it
    config.data.train_data = ("a.parquet",)
    result = to_train_config(config)
    assert result.trainer.algorithm.eps_clip_high == 0.28
    assert result.data.train_data == ["a.parquet"]
    config.trainer.algorithm.eps_clip_high = "high"
    with pytest.raises(ValueError, match=r"trainer.algorithm.eps_clip_high='high': expected float"):
        to_train_config(config)


def test_a_config_of_another_class_is_refused():
    config = TrainConfig()
    config.trainer.policy = config.trainer.critic
    message = (
        r"trainer.policy=CriticConfig\(...\): expected a mapping of the fields of PolicyConfig"
    )
    with pytest.raises(ValueError, match=message):
        to_train_config(config)
    config = TrainConfig()
    config.generator.eval_sampling_params = config.trainer.algorithm
    with pytest.raises(ValueError, match=r"eval_sampling_params=AlgorithmConfig\(...\): expected"):
        to_train_config(config)


def test_a_subclass_sets_what_it_declares_and_what_is_private():
    @dataclass
    class MyConfig(TrainConfig):
        found: int = field(default=0, init=False)

        def __post_init__(self):
            self._cache = {}
            self.found = 2

        @property
        def doubled(self):
            return 2 * self.trainer.seed

        @doubled.setter
        def doubled(self, value):
            self.trainer.seed = value // 2

    config = MyConfig()
    config.doubled = 6
    assert (config.trainer.seed, config.doubled, config.found, config._cache) == (3, 6, 2, {})
    assert to_train_config(config) == config


def test_a_subclass_that_sets_an_undeclared_attribute_is_told_so():
    @dataclass
    class MyConfig(TrainConfig):
        def __post_init__(self):
            self.seed = 1

    with pytest.raises(AttributeError, match="field 'seed'. Did you mean 'trainer.seed'"):
        MyConfig()


def test_to_train_config_copies():
    config = TrainConfig()
    copied = to_train_config(config)
    copied.trainer.seed = 1
    assert config.trainer.seed == 42
    assert to_train_config({"trainer": {"seed": 3}}).trainer.seed == 3


def test_recipe_may_return_a_config_dict(recipe):
    path = recipe("""
        from jaxrl.config import default_config

        def get_config():
            config = default_config()
            config.trainer.seed = 5
            return config
    """)
    assert load_config_file(path).trainer.seed == 5


def test_recipe_may_return_a_config_of_its_own_class(recipe):
    path = recipe("""
        from dataclasses import dataclass
        from jaxrl.config import AlgorithmConfig, default_config, make_config

        @dataclass
        class MyAlgorithmConfig(AlgorithmConfig):
            my_param: "int" = 42

        MyConfig = make_config(algorithm_cls=MyAlgorithmConfig)

        def get_config():
            config = default_config(MyConfig)
            config.trainer.algorithm.my_param = 6
            return MyConfig.from_dict_config(config)
    """)
    config = load_config_file(path)
    assert isinstance(config.trainer.algorithm, AlgorithmConfig)
    assert config.trainer.algorithm.my_param == 6


def test_default_config_of_a_user_class_needs_that_class_back():
    cls = make_config(algorithm_cls=type("Plain", (AlgorithmConfig,), {}))
    assert isinstance(to_train_config(default_config(cls), cls), cls)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1", r"recipe .*recipe.py: the file defines no function get_config\(\)"),
        (
            "def get_config(): return {'trainer': {'sed': 1}}",
            r"recipe .*recipe.py: unknown config field 'trainer.sed'. Did you mean",
        ),
        (
            "def get_config(): return None",
            r"recipe .*recipe.py: TrainConfig=None: expected a mapping of the fields",
        ),
    ],
)
def test_recipe_errors_name_the_file(recipe, text, message):
    with pytest.raises(ValueError, match=message):
        load_config_file(recipe(text))


def test_missing_recipe_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"recipe no/such.py: no such file \(working directory /"):
        load_config_file("no/such.py")
    (tmp_path / "recipe.txt").write_text("")
    with pytest.raises(ValueError, match=r"recipe.txt: not a Python file; a recipe is a .py file"):
        load_config_file(str(tmp_path / "recipe.txt"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "trainer.epoch = 1",
            r"line 4, `config.trainer.epoch = 1`: there is no field 'epoch' .* mean 'epochs'\?",
        ),
        ("trainer.lr = 1", r"line 4, .*'lr' there. .*mean 'trainer.policy.optimizer_config.lr'\?"),
        ("trainer.algoritm.gamma = 1", r"line 4, .*: algoritm. Did you mean 'algorithm'\?"),
        ("trainer.epochs = 'a'", r"line 4, .*cannot be casted to type <class 'int'>"),
    ],
)
def test_a_slip_in_a_recipe_is_shown_with_its_line(tmp_path, line, message):
    path = tmp_path / "recipe.py"
    head = "from jaxrl.config import default_config\ndef get_config():\n    config = "
    path.write_text(f"{head}default_config()\n    config.{line}\n    return config\n")
    with pytest.raises(ValueError, match=f"^recipe {path}, {message}") as caught:
        load_config_file(str(path))
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "def get_config():\n    return None.nothing\n",
            r"AttributeError: .*nothing.*recipe.py:2.$",
        ),
        ("import not_there\n", r"ModuleNotFoundError: .*'not_there' .*recipe.py:1.$"),
        ("\nif\n", r"SyntaxError: invalid syntax .recipe.py, line 2"),
    ],
)
def test_an_error_of_the_recipe_itself_is_shown_with_its_line(tmp_path, text, said):
    path = tmp_path / "recipe.py"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"^recipe {path} raised {said}"):
        load_config_file(str(path))


def test_recipes_are_found_without_a_clone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(recipe_module, "INSTALLED", (tmp_path / "none", RECIPES))
    for recipe in ("quickstart", "quickstart.py", "configs/quickstart.py", "configs/quickstart"):
        assert load_config_file(recipe).trainer.run_name == "quickstart"
    with pytest.raises(ValueError, match=r"^recipe quikstart: no recipe .*; did you mean quickst"):
        load_config_file("quikstart")
    for path in ("configs/nothing.py", "other/quickstart.py"):
        with pytest.raises(ValueError, match="no such file"):
            load_config_file(path)


def test_recipes_of_a_checkout_are_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_config_file("configs/quickstart.py").trainer.run_name == "quickstart"
    with pytest.raises(ValueError, match="did you mean quickstart"):
        load_config_file("configs/quikstart.py")


def test_a_recipe_of_the_working_directory_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("configs").mkdir()
    Path("configs/quickstart.py").write_text(
        "def get_config():\n    return {'trainer': {'run_name': 'mine'}}\n"
    )
    assert load_config_file("quickstart").trainer.run_name == "mine"


def test_a_recipe_that_another_one_loads_is_named(recipe):
    path = recipe("""
        from jaxrl.config import load_config_file

        def get_config():
            return load_config_file("configs/gues_number.py")
    """)
    with pytest.raises(ValueError, match=r"^recipe configs/gues_number.py: .*mean guess_number"):
        load_config_file(path)


def test_a_value_error_of_the_users_own_lines_names_them(recipe):
    path = recipe("""
        def get_config():
            return {"trainer": {"max_training_steps": int("3 steps")}}
    """)
    with pytest.raises(ValueError) as raised:
        load_config_file(path)
    assert str(raised.value) == (
        f"recipe {path} raised ValueError: invalid literal for int() with base 10: '3 steps' "
        f"({path}:3)"
    )


def test_a_recipe_that_loads_itself_is_refused(recipe, tmp_path):
    path = recipe("""
        from jaxrl.config import load_config_file

        def get_config():
            return load_config_file(__file__)
    """)
    for _ in range(2):  # and is not taken for one that is still being run
        with pytest.raises(ValueError, match=f"{path}: it loads itself .*another name"):
            load_config_file(path)
    (tmp_path / "recipe.py").write_text("def get_config():\n    return {}\n")
    assert load_config_file(path) == TrainConfig()
