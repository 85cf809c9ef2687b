// An allocator for PyTorch's tensors on the CPU: small blocks come from malloc, which is asked for a little more and
// aligned here; large ones are kept when they are freed, and given out again.
//
// Small: PyTorch calls posix_memalign. glibc before 2.38 cuts what lies before and behind an aligned block off and puts
// it on its lists for small blocks, where it is given to small objects that live longer. A block that is freed between
// two of these is too small for the next request of its size, and the heap grows with every step although nothing is
// lost.
//
// Large: malloc gives large blocks back to the system, which fills every page with zeros when the next step touches it
// again: up to 8 % of the time of a step. The sizes of a step's blocks repeat, so that the blocks of one step serve the
// next. What is kept is limited, see Pool.

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <c10/core/CPUAllocator.h>

#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <iterator>
#include <map>
#include <mutex>
#include <utility>

namespace {

constexpr std::size_t kAlignment = 64;  // bytes, as c10::gAlignment of torch's own allocator
constexpr std::size_t kRoom = kAlignment + sizeof(void*);

constexpr std::size_t kLarge = std::size_t{256} << 10;  // bytes from which a block comes from the pool
constexpr std::size_t kPage = std::size_t{4} << 10;
constexpr std::size_t kHugePage = std::size_t{2} << 20;
constexpr std::size_t kSlack = std::size_t{32} << 20;  // bytes that are kept in any case
constexpr std::chrono::seconds kLongest{120};          // how long a block is kept that nobody wants

// Large blocks. Those in use and those that are kept take together no more than those in use have ever taken, and an
// eighth, and kSlack; the block that was kept longest goes first. Blocks are kept for kLongest, until somebody allocates
// or frees a large block after that.
class Pool {
 public:
  // A block of `bytes` or a little more, its size in `size`; null if the system has none.
  void* take(std::size_t bytes, std::size_t& size) {
    if (bytes > PTRDIFF_MAX - kHugePage - kPage) return nullptr;
    size = (bytes + kPage - 1) / kPage * kPage;
    const std::lock_guard<std::mutex> guard(mutex_);
    void* block = reuse(size);
    if (block == nullptr) {
      shrink(size);
      block = map(size);
    }
    if (block == nullptr) {
      release_all();
      block = map(size);
    }
    if (block == nullptr) return nullptr;
    used_ += size;
    most_ = std::max(most_, used_);
    return block;
  }

  void give_back(void* block, std::size_t size) {
    const std::lock_guard<std::mutex> guard(mutex_);
    used_ -= size;
    if (!keeps_) {
      munmap(block, size);
      return;
    }
    const auto now = std::chrono::steady_clock::now();
    ++number_;
    ages_.emplace(number_, kept_.emplace(size, Kept{block, number_, now}));
    kept_bytes_ += size;
    while (!ages_.empty() && now - ages_.begin()->second->second.since > kLongest) unmap(ages_.begin()->second);
    shrink(0);
  }

  // Gives what is kept back, and keeps blocks that are freed from now on if `wanted`.
  void keep(bool wanted) {
    const std::lock_guard<std::mutex> guard(mutex_);
    keeps_ = wanted;
    start_anew();
  }

  void empty() {
    const std::lock_guard<std::mutex> guard(mutex_);
    start_anew();
  }

  // Bytes in use, bytes that are kept.
  std::pair<std::size_t, std::size_t> sizes() {
    const std::lock_guard<std::mutex> guard(mutex_);
    return {used_, kept_bytes_};
  }

  std::mutex& mutex() { return mutex_; }

 private:
  struct Kept {
    void* block;
    std::uint64_t number;
    std::chrono::steady_clock::time_point since;
  };
  using Iterator = std::multimap<std::size_t, Kept>::iterator;

  // A kept block of `size` or up to an eighth more, which `size` is then; null if there is none.
  void* reuse(std::size_t& size) {
    auto found = kept_.lower_bound(size);
    if (found == kept_.end() || found->first > size + size / 8) return nullptr;
    size = found->first;
    found = std::prev(kept_.upper_bound(size));  // the last one to be freed: some of it may be in the caches
    void* block = found->second.block;
    forget(found);
    return block;
  }

  void forget(Iterator found) {
    kept_bytes_ -= found->first;
    ages_.erase(found->second.number);
    kept_.erase(found);
  }

  void unmap(Iterator found) {
    munmap(found->second.block, found->first);
    forget(found);
  }

  void release_all() {
    while (!ages_.empty()) unmap(ages_.begin()->second);
  }

  // Lets the limit, too, be that of what is in use now.
  void start_anew() {
    release_all();
    most_ = used_;
  }

  // Gives kept blocks back to the system until there is room for `bytes` more.
  void shrink(std::size_t bytes) {
    const std::size_t most = std::max(most_, used_ + bytes), limit = most + most / 8 + kSlack;
    while (!ages_.empty() && used_ + bytes + kept_bytes_ > limit) unmap(ages_.begin()->second);
  }

  static void* map(std::size_t size) {
    const bool huge = size >= 2 * kHugePage;
    const std::size_t room = size + (huge ? kHugePage : 0);
    void* found = mmap(nullptr, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (found == MAP_FAILED) return nullptr;
    if (!huge) return found;
    auto* start = static_cast<char*>(found);
    auto* block = reinterpret_cast<char*>((reinterpret_cast<std::uintptr_t>(start) + kHugePage - 1) & ~(kHugePage - 1));
    if (block != start) munmap(start, block - start);
    if (block + size != start + room) munmap(block + size, start + room - (block + size));
    madvise(block, size / kHugePage * kHugePage, MADV_HUGEPAGE);  // without effect where the system has none
    return block;
  }

  std::mutex mutex_;
  std::multimap<std::size_t, Kept> kept_;
  std::map<std::uint64_t, Iterator> ages_;
  std::uint64_t number_ = 0;
  std::size_t used_ = 0, kept_bytes_ = 0, most_ = 0;
  bool keeps_ = true;
};

// Never destroyed: tensors of a module that outlives this library may be freed at the very end of the process.
Pool& pool() {
  static auto* made = [] {
    auto* pool = new Pool;
    // a child must not find the pool locked by a thread that it does not have
    pthread_atfork([] { ::pool().mutex().lock(); }, [] { ::pool().mutex().unlock(); },
                   [] { ::pool().mutex().unlock(); });
    return pool;
  }();
  return *made;
}

// What stands right before the data: malloc's pointer, or the size of the pool's block and one, which no pointer of
// malloc's can be. The data of a pool's block begins in its first page, each time at another place: operands that all
// begin at the same place of a page get into each other's way in the caches.
std::uintptr_t& origin_of(void* data) { return static_cast<std::uintptr_t*>(data)[-1]; }

void release(void* data) {
  if (data == nullptr) return;
  c10::profiledCPUMemoryReporter().Delete(data);
  const auto origin = origin_of(data);
  if (origin & 1)
    pool().give_back(reinterpret_cast<void*>(reinterpret_cast<std::uintptr_t>(data) & ~(kPage - 1)), origin - 1);
  else
    std::free(reinterpret_cast<void*>(origin));
}

void* allocate_small(std::size_t bytes) {
  void* origin = bytes <= PTRDIFF_MAX - kRoom ? std::malloc(bytes + kRoom) : nullptr;
  if (origin == nullptr) return nullptr;
  const auto first = reinterpret_cast<std::uintptr_t>(origin) + kRoom - 1;
  auto* data = reinterpret_cast<void*>(first & ~(kAlignment - 1));
  origin_of(data) = reinterpret_cast<std::uintptr_t>(origin);
  return data;
}

void* allocate_large(std::size_t bytes) {
  static std::atomic<std::size_t> count{0};
  std::size_t size = 0;
  void* block = bytes <= PTRDIFF_MAX - kPage ? pool().take(bytes + kPage, size) : nullptr;
  if (block == nullptr) return allocate_small(bytes);  // the process may have as many mappings as it can have
  const std::size_t places = kPage / kAlignment - 1, place = count++ * 5 % places + 1;
  auto* data = static_cast<char*>(block) + place * kAlignment;
  origin_of(data) = size + 1;
  return data;
}

class Allocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    void* data = nullptr;
    if (bytes != 0) {
      data = bytes < kLarge ? allocate_small(bytes) : allocate_large(bytes);
      if (data == nullptr) {
        c10::profiledCPUMemoryReporter().OutOfMemory(bytes);
        // the words of torch's own allocator: programs that try again with a smaller batch look for them
        TORCH_CHECK(false, "DefaultCPUAllocator: can't allocate memory: you tried to allocate ", bytes,
                    " bytes. Error code 12 (Cannot allocate memory)");
      }
      c10::profiledCPUMemoryReporter().New(data, bytes);
    }
    return {data, data, &release, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }

  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }
};

// Never destroyed, as the pool.
Allocator& allocator() {
  static auto* made = new Allocator;
  return *made;
}

PyObject* install(PyObject*, PyObject*) {
  auto* now = c10::GetCPUAllocator();
  const bool default_is_used = now == c10::GetDefaultCPUAllocator() || now == &allocator();
  if (default_is_used) c10::SetCPUAllocator(&allocator());
  return PyBool_FromLong(default_is_used);
}

PyObject* remove(PyObject*, PyObject*) {
  if (c10::GetCPUAllocator() == &allocator()) c10::SetCPUAllocator(c10::GetDefaultCPUAllocator());
  Py_RETURN_NONE;
}

PyObject* large_blocks(PyObject*, PyObject*) {
  const auto [used, kept] = pool().sizes();
  return Py_BuildValue("nn", static_cast<Py_ssize_t>(used), static_cast<Py_ssize_t>(kept));
}

PyObject* empty(PyObject*, PyObject*) {
  pool().empty();
  Py_RETURN_NONE;
}

PyObject* keep(PyObject*, PyObject* wanted) {
  pool().keep(wanted == Py_True);
  Py_RETURN_NONE;
}

PyObject* in_use(PyObject*, PyObject*) { return PyBool_FromLong(c10::GetCPUAllocator() == &allocator()); }

PyMethodDef methods[] = {
    {"install", install, METH_NOARGS,
     "Let new tensors on the CPU be allocated by this allocator; return False, without effect, if PyTorch's own was "
     "replaced by somebody else's."},
    {"remove", remove, METH_NOARGS, "Let new tensors on the CPU be allocated by PyTorch's own allocator again."},
    {"large_blocks", large_blocks, METH_NOARGS, "Return the bytes of large blocks in use, and of those that are kept."},
    {"empty", empty, METH_NOARGS, "Give the large blocks that are kept back to the system."},
    {"keep", keep, METH_O,
     "Give the large blocks that are kept back to the system, and keep those that are freed from now on if True."},
    {"in_use", in_use, METH_NOARGS, "Return whether new tensors on the CPU are allocated by this allocator."},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "cpu_allocator", nullptr, -1, methods,
                          nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_cpu_allocator() { return PyModule_Create(&definition); }
