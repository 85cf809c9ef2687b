"""Edits that make the C++ sources of ``torch_interop_utils`` in the wheel compile and load on newer torch.

The edits are applied to a copy; the installed wheel is never modified. An edit that does not match exactly as often
as expected stops the build, since a source that changed may need another edit than the one written down here.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from packaging.version import Version

from ort_zero.errors import BuildError


@dataclass(frozen=True)
class Edit:
    """One textual replacement in one source file of the wheel.

    Attributes:
        file: name of the file, unique within the extension.
        find: text to find.
        replace: text to put in its place.
        why: reason, shown when the edit does not match.
        since: first torch version that needs the edit.
        count: how often `find` must occur; any other number is an error.
    """

    file: str
    find: str
    replace: str
    why: str
    since: str = "2.13"
    count: int = 1


EDITS: tuple[Edit, ...] = (
    Edit(
        "ctx_pool.h",
        "std::shared_ptr<torch::autograd::Node>>",
        "c10::intrusive_ptr<torch::autograd::Node>>",
        "autograd nodes are held by c10::intrusive_ptr",
    ),
    Edit(
        "custom_function_fw.cc",
        "const std::shared_ptr<torch::autograd::Node>& cdata",
        "const auto cdata",
        "autograd nodes are held by c10::intrusive_ptr",
    ),
    Edit(
        "custom_function_fw.cc",
        "py_fn->cdata.lock()",
        "py_fn->cdata",
        "THPFunction::cdata is an owning pointer",
    ),
    Edit(
        "custom_function_fw.cc",
        "py_node_fn->obj;",
        "py_node_fn->pyobj();",
        "PyNode::obj was replaced by PyNode::pyobj()",
        count=2,
    ),
    Edit(
        "custom_function_fw.cc",
        "dynamic_cast<torch::autograd::PyNode*>(",
        "ort_zero_as_py_node(",
        "the typeinfo of PyNode is not exported, so a dynamic_cast to it fails at load time",
        count=2,
    ),
    Edit(
        "custom_function_fw.cc",
        "bool need_materialize_grads = true;",
        "bool need_materialize_grads = false;",
        "nodes of ours are to see which results have no gradient, and zeros would have the shape of the first run",
    ),
    Edit(
        "custom_function_fw.cc",
        "torch::utils::tensor_fromDLPack(",
        "ort_zero_from_dlpack(",
        "torch::utils::tensor_fromDLPack is not exported",
    ),
    Edit(
        "custom_function_bw.cc",
        "torch::utils::tensor_fromDLPack(",
        "ort_zero_from_dlpack(",
        "torch::utils::tensor_fromDLPack is not exported",
    ),
)

_HELPERS = """\
#include <ATen/DLConvertor.h>
#include <torch/csrc/autograd/python_function.h>
#include <torch/csrc/utils/device_lazy_init.h>

// Every PyNode is created together with its THPFunction and no other node has one, so the type of the Python object
// tells the kind of the node as surely as the typeinfo would.
static torch::autograd::PyNode* ort_zero_as_py_node(torch::autograd::Node* node) {
  PyObject* self = node == nullptr ? nullptr : node->pyobj_slot()->load_pyobj();
  if (self == nullptr || !PyObject_TypeCheck(self, &THPFunctionType)) {
    return nullptr;
  }
  return static_cast<torch::autograd::PyNode*>(node);
}

static at::Tensor ort_zero_from_dlpack(PyObject* capsule) {
  auto* managed = static_cast<DLManagedTensor*>(PyCapsule_GetPointer(capsule, "dltensor"));
  if (managed == nullptr) {
    throw py::error_already_set();
  }
  at::Tensor tensor = at::fromDLPack(managed);
  // The tensor owns the memory from here on; under this name the capsule's destructor leaves it alone.
  PyCapsule_SetName(capsule, "used_dltensor");
  torch::utils::maybe_initialize_device(tensor.device());
  return tensor;
}
"""


def _needed(edit: Edit, torch_version: str) -> bool:
    return Version(torch_version).release >= Version(edit.since).release


def apply_edits(name: str, text: str, torch_version: str) -> str:
    """Return `text`, the content of the source file `name`, with its edits for `torch_version` applied.

    Args:
        name: file name within the extension, such as ``ctx_pool.h``.
        text: content as found in the wheel.
        torch_version: version of torch to compile for; edits for later versions are left out.

    Raises:
        BuildError: an edit does not match as often as expected.
    """
    for edit in EDITS:
        if edit.file != name or not _needed(edit, torch_version):
            continue
        found = text.count(edit.find)
        if found != edit.count:
            raise BuildError(
                f"{name}: expected {edit.find!r} {edit.count} time(s), found {found}; the edit to {edit.replace!r} is "
                f"needed because {edit.why}. This onnxruntime-training has other sources than the supported one."
            )
        text = text.replace(edit.find, edit.replace)
    return text


def helpers(torch_version: str) -> str:
    """Return the C++ functions that edited sources call; empty if `torch_version` needs no edit."""
    return _HELPERS if any(_needed(edit, torch_version) for edit in EDITS) else ""


def table_hash() -> str:
    """Return a short hex digest of all edits and helpers; it changes whenever a rebuild is due."""
    return hashlib.sha256(repr((EDITS, _HELPERS)).encode()).hexdigest()[:12]
