// Operators of the stand-in: copies and fills go into the stream's queue, all others run at once, on the host.
#pragma once

#include "device.h"

#include <ATen/Functions.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

namespace npu_sim {

// The tensor's bytes, seen as a host tensor. It keeps nothing alive, as a device does not: the allocators know when
// memory is free, and a tensor that a thread of ours let go of could need Python's lock.
inline at::Tensor host_view(const at::Tensor& tensor) {
  const auto options = tensor.options().device(at::kCPU).pinned_memory(std::nullopt).requires_grad(false);
  auto view = at::from_blob(const_cast<void*>(tensor.const_data_ptr()), tensor.sizes(), tensor.strides(), options);
  view._set_conj(tensor.is_conj());
  view._set_neg(tensor.is_neg());
  return view;
}

// ---------------------------------------------------------------- making and viewing
inline at::ScalarType or_default(std::optional<at::ScalarType> dtype) {
  return dtype.value_or(at::typeMetaToScalarType(at::get_default_dtype()));
}

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

inline at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                        std::optional<at::Device> device, std::optional<bool> pin,
                        std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "only memory of the host can be pinned");
  c10::DeviceGuard guard(device.value_or(device_at(current_device)));
  return at::detail::empty_generic(size, &device_memory(), kKeys, or_default(dtype), format);
}

inline at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                                std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(device.value_or(device_at(current_device)));
  return at::detail::empty_strided_generic(size, stride, &device_memory(), kKeys, or_default(dtype));
}

inline at::Tensor as_strided(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                             std::optional<c10::SymInt> offset) {
  const auto at = offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt;
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), at);
}

inline at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

inline at::Tensor reshape_alias(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

inline const at::Tensor& resize(const at::Tensor& self, c10::SymIntArrayRef size,
                                std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(size));
  if (format) impl->empty_tensor_restride(*format);
  const auto offset = static_cast<size_t>(self.storage_offset());
  const auto needed = at::detail::computeStorageNbytesContiguous(self.sizes(), self.itemsize(), offset);
  if (needed > self.storage().nbytes()) resize_storage(self.storage(), needed);
  return self;
}

inline at::Tensor& set_storage(at::Tensor& self, at::Storage source) {
  const auto numel = static_cast<int64_t>(source.nbytes() / self.dtype().itemsize());
  return at::native::set_storage_cpu_(self, source, 0, {numel}, {1});
}

inline at::Tensor& set_storage_at(at::Tensor& self, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size,
                                  c10::SymIntArrayRef stride) {
  return at::native::set_storage_cpu_(self, source, offset.expect_int(), C10_AS_INTARRAYREF_SLOW(size),
                                      C10_AS_INTARRAYREF_SLOW(stride));
}

inline void record_stream(at::Tensor& self, c10::Stream stream) {
  device_memory().recordStream(self.storage().data_ptr(), stream);
}

// ---------------------------------------------------------------- copies
// The copy of one tensor to another, to be called when it is due. Memory is looked at then, not before.
inline auto copy_of(const at::Tensor& from, const at::Tensor& to) {
  return [source = host_view(from), target = host_view(to)]() mutable {
    const bool alike = source.dtype() == target.dtype() && source.is_conj() == target.is_conj() &&
                       source.is_neg() == target.is_neg() && source.is_contiguous() && target.is_contiguous();
    if (alike) {
      std::memcpy(target.mutable_data_ptr(), source.const_data_ptr(), source.nbytes());
    } else {
      target.copy_(source);
    }
  };
}

// Between two devices: on the stream of the one that is read, and in the order of both.
inline void copy_within(const at::Tensor& from, const at::Tensor& to) {
  auto& reads = queue_of(current_stream(from.device().index()));
  auto& writes = queue_of(current_stream(to.device().index()));
  if (&reads != &writes) reads.post_wait(writes.last());
  const auto copied = reads.post(copy_of(from, to), lateness());
  if (&reads != &writes) writes.post_wait(copied);
}

inline at::Tensor copy_from(const at::Tensor& self, const at::Tensor& dst, bool non_blocking) {
  const auto from = self.sizes() == dst.sizes() ? self : self.expand_as(dst);
  if (dst.numel() == 0) return dst;
  if (!from.is_cpu() && !dst.is_cpu()) {
    copy_within(from, dst);
    return dst;
  }
  const auto& host = from.is_cpu() ? from : dst;
  const auto& npu = from.is_cpu() ? dst : from;
  auto& queue = queue_of(current_stream(npu.device().index()));
  // A device copies by itself only to and from pinned memory, in one piece; all else the host does, at once.
  if (non_blocking && host.is_contiguous() && pinned_memory().holds(host.const_data_ptr())) {
    pinned_memory().record(host.const_data_ptr(), queue.post(copy_of(from, dst), lateness()));
  } else {
    queue.last().wait();
    copy_of(from, dst)();
  }
  return dst;
}

inline at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& dst) {
  if (self.sizes() != dst.sizes()) dst.resize_(self.sizes());
  return copy_from(self, dst, false);
}

inline at::Tensor& fill(at::Tensor& self, const at::Scalar& value) {
  if (self.numel() == 0) return self;
  auto target = host_view(self);
  queue_of(current_stream(self.device().index())).post([target, value]() mutable { target.fill_(value); }, lateness());
  return self;
}

inline at::Tensor& zero(at::Tensor& self) { return fill(self, 0); }

inline at::Scalar local_scalar(const at::Tensor& self) {
  settle();
  return host_view(self).item();
}

// ---------------------------------------------------------------- everything else, by the host's kernels
inline at::Generator host_generator(const c10::IValue& given, int device) {
  auto generator = given.isNone() ? default_generator(device) : given.toGenerator();
  TORCH_CHECK(generator.device().type() == kNpu, "Expected a 'npu' device type for generator but found '",
              generator.device().type(), "'");
  return generator.get<NpuGenerator>()->draw();
}

inline void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  settle();
  const auto& arguments = op.schema().arguments();
  const auto values = stack->end() - static_cast<int64_t>(arguments.size());
  int device = current_device;
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (values[i].isTensor() && values[i].toTensor().device().type() == kNpu) {
      device = values[i].toTensor().device().index();
      break;
    }
  }
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].name() == "generator") values[i] = host_generator(values[i], device);
  }
  at::native::cpu_fallback(op, stack);
}

// Composite on the host with the host's generator, so it is spelled out here.
inline std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p, std::optional<bool> train) {
  if (!train.value_or(true)) return {input.clone(), at::ones_like(input, input.options().dtype(at::kBool))};
  const auto mask = at::empty_like(input, input.options().dtype(at::kBool)).bernoulli_(1 - p);
  return {input.mul(mask).mul_(p < 1 ? 1 / (1 - p) : 0), mask};
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

// Regions of autocast run, without casting.
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) { library.fallback(torch::CppFunction::makeFallthrough()); }

// Copies look at these bits themselves: the default is to resolve them first, which is a copy.
TORCH_LIBRARY_IMPL(aten, Conjugate, library) { library.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, library) { library.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("as_strided", &as_strided);
  library.impl("view", &view);
  library.impl("_reshape_alias", &reshape_alias);
  library.impl("view_as_real", &at::native::view_as_real);
  library.impl("view_as_complex", &at::native::view_as_complex);
  library.impl("unfold", &at::native::unfold);
  library.impl("resize_", &resize);
  library.impl("set_.source_Storage", &set_storage);
  library.impl("set_.source_Storage_storage_offset", &set_storage_at);
  library.impl("record_stream", &record_stream);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("fill_.Scalar", &fill);
  library.impl("zero_", &zero);
  library.impl("_local_scalar_dense", &local_scalar);
  library.impl("native_dropout", &native_dropout);
}

}  // namespace npu_sim
