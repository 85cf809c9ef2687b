// Compares what a module holds with what it held, for the check that precedes each call.
//
// A model of 400 parameters has some 5,000 things that may have changed: attributes, hooks, modes, dtypes,
// requires_grad. From Python each costs 25 to 60 ns, most of it for making and freeing the objects that a comparison
// is made of; here the values are compared where they are. Nothing here runs code of the user's, but for a container
// that is no dict.

#include <torch/csrc/autograd/python_variable.h>

namespace {

// The list in `argument`, or null with a TypeError.
PyObject* list_of(PyObject* argument) {
  if (PyList_CheckExact(argument)) return argument;
  PyErr_Format(PyExc_TypeError, "a list is needed, not %.100s", Py_TYPE(argument)->tp_name);
  return nullptr;
}

bool looks_up_as_dict(PyObject* container) {
  return PyDict_Check(container) &&
         Py_TYPE(container)->tp_as_mapping->mp_subscript == PyDict_Type.tp_as_mapping->mp_subscript;
}

// are_same(containers, keys, values): whether each container still has the very same object under its key.
PyObject* are_same(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 3) return PyErr_Format(PyExc_TypeError, "are_same takes 3 lists, not %zd", count);
  for (Py_ssize_t i = 0; i < count; ++i)
    if (!list_of(arguments[i])) return nullptr;
  PyObject *containers = arguments[0], *keys = arguments[1], *values = arguments[2];
  const Py_ssize_t size = PyList_GET_SIZE(containers);
  if (PyList_GET_SIZE(keys) != size || PyList_GET_SIZE(values) != size)
    return PyErr_Format(PyExc_ValueError, "are_same takes lists of one length");
  // the lists may change while a container of the user's looks something up
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(containers) && i < PyList_GET_SIZE(keys); ++i) {
    PyObject *container = PyList_GET_ITEM(containers, i), *key = PyList_GET_ITEM(keys, i), *found;
    if (looks_up_as_dict(container)) {
      found = PyDict_GetItemWithError(container, key);
      if (!found && PyErr_Occurred()) return nullptr;
    } else {
      Py_INCREF(container);
      Py_INCREF(key);
      found = PyObject_GetItem(container, key);
      Py_DECREF(container);
      Py_DECREF(key);
      if (!found) return nullptr;
      Py_DECREF(found);  // only its address is compared
    }
    if (i >= PyList_GET_SIZE(values) || found != PyList_GET_ITEM(values, i)) Py_RETURN_FALSE;
  }
  Py_RETURN_TRUE;
}

// have_lengths(objects, lengths): whether each object has still the length that it had.
PyObject* have_lengths(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 2) return PyErr_Format(PyExc_TypeError, "have_lengths takes 2 lists, not %zd", count);
  PyObject* objects = list_of(arguments[0]);
  PyObject* lengths = list_of(arguments[1]);
  if (!objects || !lengths) return nullptr;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(objects); ++i) {
    const Py_ssize_t now = PyObject_Size(PyList_GET_ITEM(objects, i));
    if (now < 0) return nullptr;
    if (i >= PyList_GET_SIZE(lengths)) Py_RETURN_FALSE;
    const Py_ssize_t before = PyLong_AsSsize_t(PyList_GET_ITEM(lengths, i));
    if (before == -1 && PyErr_Occurred()) return nullptr;
    if (now != before) Py_RETURN_FALSE;
  }
  return PyBool_FromLong(PyList_GET_SIZE(objects) == PyList_GET_SIZE(lengths));
}

// have_types(objects, types): whether each object is still of the very same class.
PyObject* have_types(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 2) return PyErr_Format(PyExc_TypeError, "have_types takes 2 lists, not %zd", count);
  PyObject* objects = list_of(arguments[0]);
  PyObject* types = list_of(arguments[1]);
  if (!objects || !types) return nullptr;
  const Py_ssize_t size = PyList_GET_SIZE(objects);
  if (PyList_GET_SIZE(types) != size) Py_RETURN_FALSE;
  for (Py_ssize_t i = 0; i < size; ++i)
    if (reinterpret_cast<PyObject*>(Py_TYPE(PyList_GET_ITEM(objects, i))) != PyList_GET_ITEM(types, i)) Py_RETURN_FALSE;
  Py_RETURN_TRUE;
}

// The bytes that `value` gives of the tensors in a list, one each.
template <typename Value>
PyObject* of_tensors(PyObject* tensors, Value value) {
  if (!list_of(tensors)) return nullptr;
  const Py_ssize_t size = PyList_GET_SIZE(tensors);
  PyObject* result = PyBytes_FromStringAndSize(nullptr, size);
  if (!result) return nullptr;
  char* bytes = PyBytes_AS_STRING(result);
  for (Py_ssize_t i = 0; i < size; ++i) {
    PyObject* tensor = PyList_GET_ITEM(tensors, i);
    if (!THPVariable_Check(tensor)) {
      Py_DECREF(result);
      return PyErr_Format(PyExc_TypeError, "a tensor is needed, not %.100s", Py_TYPE(tensor)->tp_name);
    }
    bytes[i] = static_cast<char>(value(THPVariable_Unpack(tensor)));
  }
  return result;
}

PyObject* requires_grad(PyObject*, PyObject* tensors) {
  return of_tensors(tensors, [](const at::Tensor& tensor) { return tensor.requires_grad(); });
}

PyObject* scalar_types(PyObject*, PyObject* tensors) {
  return of_tensors(tensors, [](const at::Tensor& tensor) { return tensor.scalar_type(); });
}

PyMethodDef methods[] = {
    {"are_same", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(are_same)), METH_FASTCALL,
     "Return whether each container (first list) has the very object of the third list under its key of the second."},
    {"have_lengths", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(have_lengths)), METH_FASTCALL,
     "Return whether each object of the first list has the length in the second."},
    {"have_types", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(have_types)), METH_FASTCALL,
     "Return whether the class of each object of the first list is that in the second."},
    {"requires_grad", requires_grad, METH_O, "Return requires_grad of each tensor of a list, one byte each."},
    {"scalar_types", scalar_types, METH_O, "Return a number for the dtype of each tensor of a list, one byte each."},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "object_checks", nullptr, -1, methods,
                          nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_object_checks() { return PyModule_Create(&definition); }
