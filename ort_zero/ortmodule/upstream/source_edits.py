"""Edit the C++ sources of ``torch_interop_utils`` in the wheel, so that they compile and load on the installed torch.

Which edits a torch needs is read from its headers. An edit that does not match exactly as often as expected stops the
compilation: a source that changed may need another edit.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from ort_zero.errors import BuildError


class Edit(NamedTuple):
    """One textual replacement in one source file of the wheel, for a torch whose header has a sign."""

    file: str
    find: str
    replace: str
    header: str = ""
    sign: str = ""
    """The edit is needed where torch's header `header` has this text; every torch needs an edit without a header."""
    times: int = 1
    """How often `find` must occur."""


_FW, _BW = "custom_function_fw.cc", "custom_function_bw.cc"
_FUNCTION = "torch/csrc/autograd/python_function.h"
_OWNED = ("torch/csrc/autograd/edge.h", "c10::intrusive_ptr<Node> function")

EDITS: tuple[Edit, ...] = (
    # autograd nodes are held by c10::intrusive_ptr
    Edit("ctx_pool.h", "std::shared_ptr<torch::autograd::Node>", "c10::intrusive_ptr<torch::autograd::Node>", *_OWNED),
    Edit(_FW, "const std::shared_ptr<torch::autograd::Node>& cdata", "const auto cdata", *_OWNED),
    # THPFunction::cdata is an owning pointer
    Edit(_FW, "py_fn->cdata.lock()", "py_fn->cdata", _FUNCTION, "c10::intrusive_ptr<torch::autograd::Node> cdata"),
    # PyNode::obj was replaced by PyNode::pyobj()
    Edit(_FW, "py_node_fn->obj;", "py_node_fn->pyobj();", _FUNCTION, "PyObject* pyobj() const", 2),
    # the typeinfo of PyNode and the function tensor_fromDLPack are not exported
    Edit(_FW, "dynamic_cast<torch::autograd::PyNode*>(", "ort_zero_as_py_node(", times=2),
    Edit(_FW, "torch::utils::tensor_fromDLPack(", "ort_zero_from_dlpack("),
    Edit(_BW, "torch::utils::tensor_fromDLPack(", "ort_zero_from_dlpack("),
)

HELPERS = """\
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
"""C++ functions that edited sources call."""


def apply_edits(name: str, text: str, include: Path) -> str:
    """Return `text`, the content of the source file `name`, with the edits that the installed torch needs.

    `include` is the folder of the headers of torch.

    Raises:
        BuildError: an edit does not match as often as expected, or torch lacks a header that tells.
    """
    for edit in EDITS:
        if edit.file != name or (edit.header and edit.sign not in _header(edit.header, include)):
            continue
        count = text.count(edit.find)
        if count != edit.times:
            raise BuildError(
                f"{name}: expected {edit.find!r} {edit.times} time(s), found {count}, so the edit for this "
                "torch does not fit: pip install 'onnxruntime-training==1.19.2'"
            )
        text = text.replace(edit.find, edit.replace)
    return text


def _header(name: str, include: Path) -> str:
    try:
        return (include / name).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError as error:
        raise BuildError(
            f"torch has no header {name}, which tells how onnxruntime-training's C++ sources must be edited: this "
            "torch is newer than every version that was tried; pip install 'torch==2.13.0'"
        ) from error
