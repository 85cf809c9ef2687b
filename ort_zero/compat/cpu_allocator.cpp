// An allocator for PyTorch's tensors on the CPU that asks malloc for a little more and aligns by itself.
//
// PyTorch calls posix_memalign. glibc before 2.38 cuts what lies before and behind an aligned block off and puts it on
// its lists for small blocks, where it is given to small objects that live longer. A block that is freed between two of
// these is too small for the next request of its size, and the heap grows with every step although nothing is lost.

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <c10/core/CPUAllocator.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>

namespace {

constexpr std::size_t kAlignment = 64;  // bytes, as c10::gAlignment of torch's own allocator
constexpr std::size_t kRoom = kAlignment + sizeof(void*);

// Where malloc's own pointer stands: right before the data, so that the data alone is enough to free it.
void*& origin_of(void* data) { return static_cast<void**>(data)[-1]; }

void release(void* data) {
  if (data == nullptr) return;
  c10::profiledCPUMemoryReporter().Delete(data);
  std::free(origin_of(data));
}

class MallocAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    void* data = nullptr;
    if (bytes != 0) {
      void* origin = bytes <= PTRDIFF_MAX - kRoom ? std::malloc(bytes + kRoom) : nullptr;
      if (origin == nullptr) {
        c10::profiledCPUMemoryReporter().OutOfMemory(bytes);
        // the words of torch's own allocator: programs that try again with a smaller batch look for them
        TORCH_CHECK(false, "DefaultCPUAllocator: can't allocate memory: you tried to allocate ", bytes,
                    " bytes. Error code 12 (Cannot allocate memory)");
      }
      const auto first = reinterpret_cast<std::uintptr_t>(origin) + kRoom - 1;
      data = reinterpret_cast<void*>(first & ~(kAlignment - 1));
      origin_of(data) = origin;
      c10::profiledCPUMemoryReporter().New(data, bytes);
    }
    return {data, data, &release, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }

  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }
};

// Never destroyed: tensors of a module that outlives this library may be freed at the very end of the process.
MallocAllocator& allocator() {
  static auto* made = new MallocAllocator;
  return *made;
}

PyObject* install(PyObject*, PyObject*) {
  auto* now = c10::GetCPUAllocator();
  const bool default_is_used = now == c10::GetDefaultCPUAllocator() || now == &allocator();
  if (default_is_used) c10::SetCPUAllocator(&allocator());
  return PyBool_FromLong(default_is_used);
}

PyObject* in_use(PyObject*, PyObject*) { return PyBool_FromLong(c10::GetCPUAllocator() == &allocator()); }

PyMethodDef methods[] = {
    {"install", install, METH_NOARGS,
     "Let new tensors on the CPU be allocated by this allocator; return False, without effect, if PyTorch's own was "
     "replaced by somebody else's."},
    {"in_use", in_use, METH_NOARGS, "Return whether new tensors on the CPU are allocated by this allocator."},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "cpu_allocator", nullptr, -1, methods,
                          nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_cpu_allocator() { return PyModule_Create(&definition); }
