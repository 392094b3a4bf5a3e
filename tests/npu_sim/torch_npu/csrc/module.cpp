// The stand-in as a Python module. One translation unit: what takes the compiler's time is torch's headers.
#include "collectives.h"

#include <torch/csrc/utils/pybind.h>

#include <fcntl.h>

namespace npu_sim {
namespace {

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Registered {
  Registered() {
    c10::SetAllocator(kNpu, &device_memory());
    at::setHostAllocator(kNpu, &pinned_memory());
    at::RegisterPrivateUse1HooksInterface(new Hooks());
  }
} registered;

// For another process: our number, the number of the file behind the memory here, its size, and where the tensor
// begins.
std::tuple<int, int, size_t, size_t> export_handle(const at::Tensor& tensor) {
  settle();
  const auto [fd, size, offset] = device_memory().shared_file(tensor.const_data_ptr());
  return {getpid(), fd, size, offset};
}

// All of the memory that another process exported, as bytes.
at::Tensor import_handle(int pid, int fd, size_t size, int device) {
  use_device();
  const auto path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(fd);
  const int opened = open(path.c_str(), O_RDWR | O_CLOEXEC);
  TORCH_CHECK(opened >= 0, "npu stand-in: the memory of process ", pid, " cannot be opened (", std::strerror(errno),
              ")");
  auto memory = import_memory(opened, size, device);
  close(opened);
  at::Storage storage(c10::Storage::use_byte_size_t(), size, std::move(memory), &device_memory(), false);
  auto bytes = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), kKeys, at::scalarTypeToTypeMeta(at::kByte));
  bytes.unsafeGetTensorImpl()->set_sizes_contiguous({static_cast<int64_t>(size)});
  return bytes;
}

}  // namespace
}  // namespace npu_sim

PYBIND11_MODULE(npu_sim_c, module) {
  using namespace npu_sim;
  module.def("device_count", &device_count);
  module.def("current_device", [] { return current_device; });
  module.def("set_device", [](int index) {
    use_device();
    Guard().setDevice(device_at(index));
    open_context(index);
  });
  module.def("in_use", [] { return in_use.load(); });
  module.def("forked", [] { return forked.load(); });
  module.def("default_generator", &default_generator);
  module.def("elapsed_ms", [](int64_t from, int64_t to) {
    return Guard().elapsedTime(reinterpret_cast<void*>(from), reinterpret_cast<void*>(to), 0);
  });
  module.def("export_handle", &export_handle, py::call_guard<py::gil_scoped_release>());
  module.def("import_handle", &import_handle);
  module.def("hccl", [](intrusive_ptr<c10d::Backend> gloo) -> intrusive_ptr<c10d::Backend> {
    return c10::make_intrusive<Hccl>(std::move(gloo));
  });
}
