"""Edits that make the C++ sources of ``torch_interop_utils`` in the wheel compile and load on the installed torch.

Which edits a torch needs is read from its headers. The edits are applied to a copy; the installed wheel is never
modified. An edit that does not match exactly as often as expected stops the build, since a source that changed may need
another edit than the one written down here.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from ort_zero.errors import BuildError


@dataclass(frozen=True)
class Edit:
    """One textual replacement in one source file of the wheel.

    Attributes:
        file: name of the file, unique within the extension.
        find: text to find.
        replace: text to put in its place.
        why: reason, shown when the edit does not match.
        header: header of torch that tells whether the edit is needed; empty if every torch needs it.
        sign: the edit is needed where `header` has this text.
        count: how often `find` must occur; any other number is an error.
    """

    file: str
    find: str
    replace: str
    why: str
    header: str = ""
    sign: str = ""
    count: int = 1


_EDGE, _PYTHON_FUNCTION = "torch/csrc/autograd/edge.h", "torch/csrc/autograd/python_function.h"

EDITS: tuple[Edit, ...] = (
    Edit(
        "ctx_pool.h",
        "std::shared_ptr<torch::autograd::Node>>",
        "c10::intrusive_ptr<torch::autograd::Node>>",
        "autograd nodes are held by c10::intrusive_ptr",
        header=_EDGE,
        sign="c10::intrusive_ptr<Node> function",
    ),
    Edit(
        "custom_function_fw.cc",
        "const std::shared_ptr<torch::autograd::Node>& cdata",
        "const auto cdata",
        "autograd nodes are held by c10::intrusive_ptr",
        header=_EDGE,
        sign="c10::intrusive_ptr<Node> function",
    ),
    Edit(
        "custom_function_fw.cc",
        "py_fn->cdata.lock()",
        "py_fn->cdata",
        "THPFunction::cdata is an owning pointer",
        header=_PYTHON_FUNCTION,
        sign="c10::intrusive_ptr<torch::autograd::Node> cdata",
    ),
    Edit(
        "custom_function_fw.cc",
        "py_node_fn->obj;",
        "py_node_fn->pyobj();",
        "PyNode::obj was replaced by PyNode::pyobj()",
        header=_PYTHON_FUNCTION,
        sign="PyObject* pyobj() const",
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
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/python_function.h>
#include <torch/csrc/utils/device_lazy_init.h>

// Every PyNode is created together with its THPFunction and no other node has one, so the type of the Python object
// tells the kind of the node as surely as the typeinfo would.
static bool ort_zero_is_python_function(PyObject* self) {
  return self != nullptr && PyObject_TypeCheck(self, &THPFunctionType);
}

template <typename N>
static auto ort_zero_has_python_function(N* node, int) -> decltype(node->pyobj_slot()->load_pyobj(), bool()) {
  return ort_zero_is_python_function(node->pyobj_slot()->load_pyobj());
}

// Older versions of torch keep the object where the base class does not show it.
template <typename N>
static bool ort_zero_has_python_function(N* node, long) {
  PyObject* self = torch::autograd::functionToPyObject(node->getptr());
  const bool is_one = ort_zero_is_python_function(self);
  Py_XDECREF(self);
  return is_one;
}

static torch::autograd::PyNode* ort_zero_as_py_node(torch::autograd::Node* node) {
  if (node == nullptr || !ort_zero_has_python_function(node, 0)) {
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


def _needed(edit: Edit, include: Path) -> bool:
    if not edit.header:
        return True
    try:
        return edit.sign in (include / edit.header).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError as error:
        raise BuildError(
            f"torch has no header {edit.header}, which tells whether {edit.file} of onnxruntime-training must be "
            "edited: this torch is newer than every version that was tried; pip install 'torch==2.13.0'"
        ) from error


def apply_edits(name: str, text: str, include: Path) -> str:
    """Return `text`, the content of the source file `name`, with the edits applied that the installed torch needs.

    Args:
        name: file name within the extension, such as ``ctx_pool.h``.
        text: content as found in the wheel.
        include: folder of the headers of torch to compile for; they tell which edits are needed.

    Raises:
        BuildError: an edit does not match as often as expected, or torch lacks a header that tells.
    """
    for edit in EDITS:
        if edit.file != name or not _needed(edit, include):
            continue
        found = text.count(edit.find)
        if found != edit.count:
            raise BuildError(
                f"{name}: expected {edit.find!r} {edit.count} time(s), found {found}; the edit to {edit.replace!r} is "
                f"needed because {edit.why}. This onnxruntime-training has other sources than the supported one."
            )
        text = text.replace(edit.find, edit.replace)
    return text


def helpers() -> str:
    """Return the C++ functions that edited sources call."""
    return _HELPERS


def table_hash() -> str:
    """Return a short hex digest of all edits and helpers; it changes whenever a rebuild is due."""
    return hashlib.sha256(repr((EDITS, _HELPERS)).encode()).hexdigest()[:12]
