"""Equal models have equal fingerprints in every process, and all that changes a graph changes them, code too."""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib
import importlib.util
import os
import subprocess
import sys
import textwrap
import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ort_zero.compat import versions
from ort_zero.ortmodule.runtime.export_cache import cache_key
from ort_zero.ortmodule.runtime.export_cache.cache_key import model, packages
from ort_zero.ortmodule.runtime.export_cache.criteria import Criterion, criterion, difference
from ort_zero.ortmodule.runtime.export_cache.described import Describer
from ort_zero.ortmodule.runtime.export_cache.serialization import NotStorable
from ort_zero.ortmodule.runtime.export_cache.source_code import SourceCode


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


@dataclasses.dataclass
class Options:
    rate: float = 0.5
    names: tuple = ("a", "b")


class Helper:
    """No module, but part of what a module computes."""

    __slots__ = ("scale", "owner")

    def __init__(self, scale, owner=None):
        self.scale = scale
        self.owner = owner

    def apply(self, x):
        return x * self.scale


class Config:
    def __init__(self, **values):
        self.values = values

    def to_dict(self):
        return self.values


def twice(x, factor=2):
    return x * factor


def thrice(x, factor=2):
    return x * factor * 1


def scaled_by(scale):
    return lambda x: x * scale


class Net(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.first = nn.Linear(3, width)
        self.rest = nn.Sequential(nn.Dropout(0.1), nn.LayerNorm(width), nn.Linear(width, 3))
        self.register_buffer("table", torch.zeros(2))
        self.register_buffer("hidden", torch.zeros(2), persistent=False)
        self.values = {"a": [1, 2.5, None], "b": (True, "text")}
        self.kinds = {"x", "y", "z", "long names", "of several", "words"}
        self.colour, self.dtype, self.options = Colour.RED, torch.float32, Options()
        self.constant = torch.arange(3.0)
        self.helper = Helper(2.0, owner=self)
        self.activation, self.bound = functools.partial(twice, factor=3), self.helper.apply
        self.own = scaled_by(2)
        self.space = SimpleNamespace(a=1)
        self.config = Config(layers=2, name="net")
        self.hook = self.first.register_forward_hook(lambda module, args, output: output)

    def forward(self, x):
        return self.rest(self.own(self.first(x)))


def set_path(path, value):
    """Return a change: sets an attribute of the net, or of a part of it."""
    *parts, last = path.split(".")

    def change(net):
        owner = functools.reduce(getattr, parts, net)
        setattr(owner, last, value)

    change.__name__ = path
    return change


def call(words, function):
    function.__name__ = words
    return function


CHANGES = [
    set_path("values", {"a": [1, 2.5, 0], "b": (True, "text")}),
    set_path("values", {"a": (1, 2.5, None), "b": (True, "text")}),
    set_path("values", {"a": [True, 2.5, None], "b": (True, "text")}),
    set_path("kinds", {"x", "y"}),
    set_path("colour", Colour.BLUE),
    set_path("dtype", torch.float64),
    set_path("options.rate", 0.25),
    set_path("constant", torch.arange(3.0) + 1e-7),
    set_path("constant", torch.arange(3)),
    set_path("helper.scale", 2.5),
    set_path("helper", None),
    set_path("activation", functools.partial(twice, factor=4)),
    set_path("activation", functools.partial(thrice, factor=3)),
    set_path("bound", Helper(3.0).apply),
    set_path("own", scaled_by(3)),
    set_path("space.a", 2),
    set_path("rest.1.eps", 1e-6),
    set_path("rest.0.p", 0.2),
    set_path("config", Config(layers=3, name="net")),
    set_path("first.weight.requires_grad", False),
    set_path("training", False),
    set_path("rest.0.training", False),
    set_path("first", nn.Linear(3, 4, bias=False)),
    set_path("rest.2", nn.Linear(4, 5)),
    set_path("another", 1),
    set_path("another", int),
    set_path("unlisted", [nn.Linear(1, 1)]),
    call("dtype of parameters", lambda net: net.double()),
    call("a tie", lambda net: setattr(net.rest[1], "weight", net.rest[1].bias)),
    call("a buffer", lambda net: net.register_buffer("table", torch.zeros(3))),
    call("a hook", lambda net: net.first.register_forward_hook(lambda module, args, output: output + 1)),
    call("no hook", lambda net: net.hook.remove()),
    call("order", lambda net: net._modules.update(first=net._modules.pop("first"))),
    call("a forward of its own", lambda net: setattr(net, "forward", net.first.forward)),
]


def parts_of(change):
    net = Net()
    change(net)
    return model(net)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_every_change_of_the_model_is_seen_and_named(change):
    before, after = model(Net()), parts_of(change)
    assert before.digest != after.digest
    words = difference(before.parts, after.parts)
    assert words and "0x" not in words


def test_what_does_not_change_the_graph_is_not_seen():
    def weights(net):
        nn.init.ones_(net.first.weight)
        net.table.fill_(3.0)
        net.hidden.fill_(3.0)
        net.ds_grads_remaining = 7
        net.zero_grad()

    def older(net):
        for _ in range(3):  # hooks are numbered in the process
            net.rest[0].register_forward_hook(print).remove()
        net.kinds = set(sorted(net.kinds, reverse=True))

    before = model(Net())
    assert difference(before.parts, parts_of(weights).parts) == ""
    assert difference(before.parts, parts_of(older).parts) == ""
    assert before.about == "Net"


def test_a_class_that_is_patched_is_seen(monkeypatch):
    before = model(Net())
    monkeypatch.setattr(Net, "forward", lambda self, x: x)
    assert f"class {__name__}.Net" in difference(before.parts, model(Net()).parts)
    monkeypatch.undo()
    assert model(Net()).digest == before.digest
    monkeypatch.setattr(Net, "FLAG", True, raising=False)
    assert model(Net()).digest != before.digest


def test_a_partitioned_parameter_counts_by_its_full_shape():
    net = Net()
    before = model(net)
    weight = net.first.weight
    weight.ds_id, weight.ds_shape = 0, weight.shape
    weight.data = torch.empty(0)
    assert difference(before.parts, model(net).parts) == ""


def test_values_that_cannot_be_read_are_an_error():
    net = Net()

    class Odd(torch.Tensor):
        @classmethod
        def __torch_function__(cls, *args, **kwargs):
            raise RuntimeError("not mine")

    net.constant = torch.ones(2).as_subclass(Odd)
    with pytest.raises(NotStorable, match="Odd"):
        model(net)


def test_it_is_the_same_in_another_process_whatever_the_hash_seed():
    folder = os.path.dirname(__file__)
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); junk = [object() for _ in range(int(sys.argv[2]))]\n"
        "import test_cache_key as t\n"
        "from ort_zero.ortmodule.runtime.export_cache.cache_key import model, packages\n"
        "c = model(t.Net()); print(c.digest, packages().digest)\n"
        "assert not [p for p in [*c.parts, *c.parts.values()] if '0x' in p]"
    )
    seen = set()
    for seed, junk in (("0", "1"), ("1", "100000")):
        done = subprocess.run(
            [sys.executable, "-c", code, folder, junk],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        seen.add(done.stdout)
    assert len(seen) == 1


def test_gpt2_takes_milliseconds_and_names_its_configuration():
    import transformers

    made = [transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=12, n_embd=16, n_head=n)) for n in (2, 4)]
    model(made[0])
    times = []
    for _ in range(5):
        start = time.perf_counter()
        found = model(made[0])
        times.append(time.perf_counter() - start)
    assert min(times) < 0.2, "30 ms on a machine that does nothing else"
    words = difference(found.parts, model(made[1]).parts)
    assert "more" in words
    assert found.parts["config.n_head"] == "2" and found.parts["parameter lm_head.weight"] == "= transformer.wte.weight"
    made[0].config._attn_implementation = "eager"
    assert model(made[0]).digest != found.digest


# -- criteria ----------------------------------------------------------------------------------------------------------


def test_differences_are_told_in_words():
    old = criterion({"torch": "2.12.0", "gone": 1, "long": "x" * 100, "same": [1]})
    new = criterion({"torch": "2.13.0", "long": "y" * 100, "same": [1], "come": 1})
    assert difference(old.parts, new.parts) == "torch 2.12.0 -> 2.13.0, gone is gone, long and 1 more"
    assert difference(old.parts, old.parts) == ""


def test_the_digest_is_that_of_the_parts_in_any_order():
    one, other = criterion({"a": 1, "b": "x" * 99}), criterion({"b": "x" * 99, "a": 1})
    assert one.digest == other.digest and len(one.digest) == 32
    assert one.digest != criterion({"a": 2, "b": "x" * 99}).digest != criterion({"a": 2, "b": "y" * 99}).digest
    assert Criterion({"ab": "c"}).digest != Criterion({"a": "bc"}).digest
    assert all(len(part) < 60 for part in one.parts.values())
    forged = one.parts["b"]
    assert criterion({"b": forged}).parts["b"] != forged


def test_packages_have_versions_and_the_content_of_our_own_code(tmp_path):
    found = packages()
    assert found.parts["torch"] == torch.__version__ and found.parts["onnxruntime-training"] == (
        versions.installed("onnxruntime-training") or "unknown"
    )
    assert {"python", "onnx", "ort_zero", "machine", "cpu"} <= set(found.parts)
    assert ("transformers" in found.parts) == ("transformers" in sys.modules)
    (tmp_path / "a.py").write_text("1")
    before = cache_key._own_code(tmp_path)
    (tmp_path / "a.py").write_text("2")
    assert cache_key._own_code(tmp_path) != before


# -- code --------------------------------------------------------------------------------------------------------------

MODEL = """
    import functools, math, threading
    import torch.nn.functional as F
    from torch import nn
    import {helpers} as helpers
    from {helpers} import scale, Pair, Data

    FLAG = True
    WARNED = False
    UNUSED = 1
    CACHE = {{}}

    def activation(x):
        CACHE[len(CACHE)] = x
        return F.gelu(x) if FLAG else x

    def decorated(function):
        @functools.wraps(function)
        def wrapper(*args):
            return function(*args)
        return wrapper

    class Net(nn.Module):
        @decorated
        def forward(self, x):
            return activation(scale(x)) * helpers.FACTOR * Pair(1, 2).left * Data(1).UNUSED

    def warns():
        global WARNED
        if not WARNED:
            WARNED = True
"""
HELPERS = """
    import collections, dataclasses
    FACTOR = 2
    Pair = collections.namedtuple("Pair", "left right")

    @dataclasses.dataclass
    class Data:
        UNUSED: int

    def scale(x):
        return x * 2

    def not_run(x):
        return x
"""


@pytest.fixture
def modules(tmp_path, monkeypatch, request):
    """Two loaded modules of the user, written before this process began as far as anybody can tell."""
    suffix = str(abs(hash(request.node.name)))
    names = [f"model_{suffix}", f"helpers_{suffix}"]
    for name, text in zip(names, (MODEL, HELPERS), strict=True):
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(text).format(helpers=names[1]) if text is MODEL
                                             else textwrap.dedent(text))  # fmt: skip
        os.utime(tmp_path / f"{name}.py", (1, 1))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield [importlib.import_module(name) for name in names]
    for name in names:
        sys.modules.pop(name, None)


def code_of(*modules, net=None):
    """Return the parts of the code that a model of these modules depends on."""
    return SourceCode([module.__name__ for module in modules], net).criterion.parts


def rewrite(module, old, new):
    """Edit a module's file and load it, as another process would find it."""
    with open(module.__file__) as file:
        text = file.read()
    assert old in text
    with open(module.__file__, "w") as file:
        file.write(text.replace(old, new))
    os.utime(module.__file__, (2, 2))
    importlib.reload(module)


def test_the_files_of_a_model_and_of_what_it_imports_count_and_libraries_do_not(modules):
    net = modules[0].Net()
    net.kind, net.other_kind = int, nn.Linear
    describe = Describer(net)
    model(net, describe)
    parts = SourceCode(describe.modules(), net).criterion.parts
    assert {key for key in parts if key.endswith(".py") and " of " not in key} == {f"{m.__name__}.py" for m in modules}
    assert not any("UNUSED" in key for key in parts)
    assert difference(parts, code_of(modules[0])) == ""


def test_an_edit_of_an_imported_file_is_named(modules):
    before = code_of(modules[0])
    rewrite(modules[1], "return x\n", "return x + 0\n")
    assert difference(before, code_of(modules[0])) == f"{modules[1].__name__}.py"


def test_a_file_that_is_not_imported_may_change(modules):
    before = code_of(modules[1])
    rewrite(modules[0], "UNUSED = 1", "UNUSED = 2")
    assert difference(before, code_of(modules[1])) == ""


def test_globals_that_are_read_count(modules, monkeypatch):
    net, helpers = modules
    before = code_of(net)

    def changed():
        found = difference(before, code_of(net))
        monkeypatch.undo()
        return found

    monkeypatch.setattr(net, "FLAG", False)
    assert changed() == f"FLAG of {net.__name__}.py True -> False"
    monkeypatch.setattr(helpers, "FACTOR", 3)
    assert changed() == f"FACTOR of {helpers.__name__}.py 2 -> 3"
    monkeypatch.setattr(net, "activation", helpers.scale)
    assert changed() == f"activation of {net.__name__}.py is new"
    monkeypatch.setattr(net, "scale", helpers.not_run)
    assert changed() == f"scale of {net.__name__}.py"
    monkeypatch.setattr(torch.nn.functional, "gelu", helpers.scale)
    assert changed() == "gelu of torch/nn/functional.py is new"
    monkeypatch.setattr(net, "UNUSED", 2)
    monkeypatch.delattr(helpers, "not_run")
    net.CACHE["more"] = 1
    monkeypatch.setattr(torch.nn.functional, "gelu", torch.nn.functional.silu)  # torch's own: an export does so
    assert changed() == ""


def test_a_class_whose_decorated_method_changes_is_seen(modules):
    before = code_of(modules[0])
    rewrite(modules[0], "Pair(1, 2).left", "Pair(1, 2).right")
    assert difference(before, code_of(modules[0])) == f"{modules[0].__name__}.py"


def test_a_flag_that_the_code_sets_counts_as_it_was_before(modules):
    before = code_of(modules[0])
    modules[0].warns()
    assert difference(before, code_of(modules[0])) == f"WARNED of {modules[0].__name__}.py False -> True"
    modules[0].WARNED = False  # as in a new process
    assert difference(before, code_of(modules[0])) == ""


def test_a_module_that_is_not_loaded_is_no_match(modules):
    del sys.modules[modules[1].__name__]
    with pytest.raises(NotStorable, match=f"code of .*{modules[1].__name__}.py is in no module that has a file"):
        code_of(modules[0])


def test_a_module_that_a_function_imports_counts(modules, tmp_path):
    local = "    from {} import scale as local\n    x = local(x)\n    return x * 2"
    rewrite(modules[1], "return x * 2", local.format(f"local_{modules[1].__name__}").lstrip())
    file = tmp_path / f"local_{modules[1].__name__}.py"
    file.write_text("def scale(x):\n    return x\n")
    os.utime(file, (1, 1))
    before = code_of(modules[0])
    assert not any(key.startswith("local_") for key in before), "it is not loaded"
    loaded = importlib.import_module(file.stem)
    after = code_of(modules[0])
    assert difference(before, after) == f"{file.name} is new"
    rewrite(loaded, "return x\n", "return x + 1\n")
    assert difference(after, code_of(modules[0])) == file.name


def test_the_same_code_in_another_folder_is_as_good(modules, tmp_path, monkeypatch):
    before = code_of(modules[1])
    other = tmp_path / "copy" / f"{modules[1].__name__}.py"
    other.parent.mkdir()
    other.write_bytes(open(modules[1].__file__, "rb").read())
    os.utime(other, (1, 1))
    monkeypatch.setattr(modules[1], "__file__", str(other))
    assert difference(before, code_of(modules[1])) == ""
    other.write_text("FACTOR = 3")
    os.utime(other, (1, 1))
    assert difference(before, code_of(modules[1])) == other.name


def test_a_file_that_changed_since_the_process_began_is_never_trusted(modules):
    code_of(modules[1])
    later = time.time() + 60
    os.utime(modules[1].__file__, (later, later))
    with pytest.raises(NotStorable, match=f"{modules[1].__name__}.*was changed after this process began"):
        code_of(modules[1])
    os.unlink(modules[1].__file__)
    with pytest.raises(NotStorable, match="is gone"):
        code_of(modules[1])


def test_code_in_no_file_is_not_storable(modules, monkeypatch):
    space = {"__name__": "nowhere"}
    exec("def forward(x):\n    return x", space)
    net = Net()
    net.own = space["forward"]
    with pytest.raises(NotStorable, match="<string>"):
        model(net)
    monkeypatch.setattr(Net, "forward", space["forward"])
    with pytest.raises(NotStorable, match="<string>"):
        model(Net())
    with pytest.raises(NotStorable, match="nowhere is in no file"):
        SourceCode(["nowhere"])


def test_code_that_functions_generate_is_not_storable():
    with pytest.raises(NotStorable, match="eval_with_key"):
        model(torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU())))


def test_code_that_calls_exec_is_not_storable(modules):
    rewrite(modules[1], "return x * 2", "return eval('x * 2')")
    with pytest.raises(NotStorable, match=f"code of {modules[1].__name__}.py calls eval"):
        code_of(modules[0])


def test_a_global_module_or_weight_is_not_storable(modules, monkeypatch):
    for value in (nn.Parameter(torch.ones(())), nn.Linear(1, 1)):
        monkeypatch.setattr(modules[0], "FLAG", value)
        with pytest.raises(NotStorable, match="FLAG, whose values would be constants"):
            code_of(modules[0])
    monkeypatch.setattr(modules[0], "FLAG", nn.Dropout(0.1))
    before = code_of(modules[0])
    monkeypatch.setattr(modules[0], "FLAG", nn.Dropout(0.2))
    assert difference(before, code_of(modules[0])) == f"FLAG of {modules[0].__name__}.py"
    net = nn.Sequential(nn.Linear(1, 1))
    for value in (net, net[0], nn.Sequential(net), net[0].weight):
        monkeypatch.setattr(modules[0], "FLAG", value)
        code_of(modules[0], net=net)


def test_a_global_tensor_counts_by_its_values(modules, monkeypatch):
    monkeypatch.setattr(modules[1], "FACTOR", torch.tensor([2.0]))
    before = code_of(modules[0])
    monkeypatch.setattr(modules[1], "FACTOR", torch.tensor([2.0]))
    assert difference(before, code_of(modules[0])) == ""
    monkeypatch.setattr(modules[1], "FACTOR", torch.tensor([3.0]))
    assert "FACTOR" in difference(before, code_of(modules[0]))


def test_installed_packages_count_by_version_and_those_of_the_model_by_their_files_too():
    import transformers

    net = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_embd=16, n_head=2))
    describe = Describer(net)
    model(net, describe)
    code = SourceCode(describe.modules(), net)
    assert code.packages["transformers"] == transformers.__version__
    files = {key for key in code.criterion.parts if key.startswith("transformers/")}
    masks = importlib.util.find_spec("transformers.masking_utils")  # transformers 4.44 has none
    below = "transformers/masking_utils.py" if masks else "transformers/modeling_utils.py"
    assert {"transformers/models/gpt2/modeling_gpt2.py", below} <= files
    assert not any(key.startswith(("torch/", "numpy/")) for key in code.criterion.parts)


def test_code_of_a_main_script_counts_across_processes(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent("""
        import json, sys, torch
        from ort_zero.ortmodule.runtime.export_cache.criteria import difference
        from ort_zero.ortmodule.runtime.export_cache.source_code import SourceCode
        SCALE = 2
        class Net(torch.nn.Module):
            def forward(self, x):
                return x * SCALE
        def main():
            found = dict(SourceCode(["__main__"]).criterion.parts)
            if len(sys.argv) > 2:
                print(difference(json.load(open(sys.argv[1])), found))
            else:
                json.dump(found, open(sys.argv[1], "w"))
        main()
    """)
    )
    command = [sys.executable, str(script), str(tmp_path / "code.json")]
    subprocess.run(command, check=True)
    look = functools.partial(subprocess.run, [*command, "look"], check=True, capture_output=True, text=True)
    assert look().stdout == "\n"
    script.write_text(script.read_text().replace("SCALE = 2", "SCALE = 3"))
    assert look().stdout == "SCALE of train.py 2 -> 3, train.py\n"


def test_processors_of_one_name_with_other_instructions_differ(monkeypatch):
    """ORT lays an optimized model out for the vectors of a processor; hosts with one home may have several."""
    found = []
    for flags in ("fpu avx2", "avx2 fpu", "fpu avx2 avx512f"):
        text = f"model name\t: EPYC\nflags\t\t: {flags}\n"
        monkeypatch.setattr(cache_key.Path, "read_text", lambda self, text=text: text)
        found.append(cache_key._cpu())
    assert found[0] == found[1] != found[2] and all(name.startswith("EPYC ") for name in found)
