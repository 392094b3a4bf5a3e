// What torch asks of a device: its guard (devices, streams, events), its random generators and its hooks.
#pragma once

#include "memory.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/Generator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace npu_sim {

// ---------------------------------------------------------------- devices, streams, events
struct EventState {
  Mark mark;
  std::shared_ptr<Clock::time_point> passed;  // when, if it was asked for
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kNpu; }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(device_count()); }
  c10::Device getDevice() const override { return device_at(current_device); }

  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    setDevice(device);
    return before;
  }

  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < device_count(), "npu device index ", int(device.index()),
                " is out of range: there are ", device_count());
    uncheckedSetDevice(device);
  }

  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) current_device = device.index();
  }

  c10::Stream getStream(c10::Device device) const override { return stream_of(current_stream(index_of(device))); }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream_of({index_of(device), 0}); }

  c10::Stream getNewStream(c10::Device device, int = 0) const override {
    return stream_of({index_of(device), pooled_stream(index_of(device))});
  }

  c10::Stream getStreamFromGlobalPool(c10::Device device, bool = false) const override { return getNewStream(device); }

  c10::Stream exchangeStream(c10::Stream stream) const override {
    const auto before = getStream(stream.device());
    current_streams[stream.device_index()] = stream.id();
    return before;
  }

  bool queryStream(const c10::Stream& stream) const override { return queue(stream).last().reached(); }
  void synchronizeStream(const c10::Stream& stream) const override { queue(stream).last().wait(); }

  void synchronizeDevice(const c10::DeviceIndex index) const override { drain(index < 0 ? current_device : index); }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
              const c10::EventFlag flag) const override {
    if (*event == nullptr) *event = new EventState();
    auto* state = static_cast<EventState*>(*event);
    if (flag != c10::EventFlag::BACKEND_DEFAULT) {
      state->mark = queue(stream).last();
      return;
    }
    state->passed = std::make_shared<Clock::time_point>();
    state->mark = queue(stream).post([passed = state->passed] { *passed = Clock::now(); });
  }

  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) queue(stream).post_wait(static_cast<EventState*>(event)->mark);
  }

  bool queryEvent(void* event) const override {
    return event == nullptr || static_cast<EventState*>(event)->mark.reached();
  }

  void synchronizeEvent(void* event) const override {
    if (event != nullptr) static_cast<EventState*>(event)->mark.wait();
  }

  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<EventState*>(event);
  }

  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    TORCH_CHECK(from != nullptr && to != nullptr, "both events must be recorded");
    const auto &start = *static_cast<EventState*>(from), &end = *static_cast<EventState*>(to);
    TORCH_CHECK(start.passed && end.passed, "both events must be made with enable_timing=True");
    TORCH_CHECK(start.mark.reached() && end.mark.reached(), "both events must have passed; synchronize first");
    return std::chrono::duration<double, std::milli>(*end.passed - *start.passed).count();
  }

  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const override {
    device_memory().recordStream(pointer, stream);
  }

 private:
  static int index_of(c10::Device device) { return device.index() < 0 ? current_device : device.index(); }
  static Queue& queue(const c10::Stream& stream) { return queue_of({stream.device_index(), stream.id()}); }

  static c10::Stream stream_of(StreamKey key) {
    return c10::Stream(c10::Stream::UNSAFE, device_at(key.first), key.second);
  }
};

// ---------------------------------------------------------------- random numbers
// A seed and how far it was used: 16 bytes of state, as on a real device, and other numbers than the host draws.
class NpuGenerator final : public c10::GeneratorImpl {
 public:
  explicit NpuGenerator(int device)
      : GeneratorImpl(device_at(device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}

  static c10::DeviceType device_type() { return kNpu; }

  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
    offset_ = 0;
  }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }

  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }

  void set_state(const c10::TensorImpl& state) override {
    at::detail::check_rng_state(state);
    TORCH_CHECK(state.numel() == kStateBytes, "the state of an npu generator has ", kStateBytes, " bytes, not ",
                state.numel());
    const auto* data = static_cast<const char*>(state.data());
    std::memcpy(&seed_, data, sizeof seed_);
    std::memcpy(&offset_, data + sizeof seed_, sizeof offset_);
  }

  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::detail::empty_cpu({kStateBytes}, at::kByte);
    auto* data = static_cast<char*>(state.mutable_data_ptr());
    std::memcpy(data, &seed_, sizeof seed_);
    std::memcpy(data + sizeof seed_, &offset_, sizeof offset_);
    return state.getIntrusivePtr();
  }

  // A host generator for the random numbers of one operator; the next one draws others.
  at::Generator draw() {
    std::lock_guard<std::mutex> lock(mutex_);
    uint64_t mixed =
        seed_ + (offset_ + 1) * 0x9E3779B97F4A7C15ULL;  // the host's engine takes 32 bits: spread both over them
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9ULL;
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EBULL;
    offset_ += 4;  // real devices count in fours
    return at::make_generator<at::CPUGeneratorImpl>((mixed ^ (mixed >> 31)) >> 32);
  }

 private:
  static constexpr int64_t kStateBytes = 16;

  NpuGenerator* clone_impl() const override {
    auto* copy = new NpuGenerator(device().index());
    copy->seed_ = seed_;
    copy->offset_ = offset_;
    return copy;
  }

  uint64_t seed_ = c10::default_rng_seed_val;
  uint64_t offset_ = 0;
};

inline const at::Generator& default_generator(int device) {
  static const auto* all = [] {
    auto* generators = new std::vector<at::Generator>();
    for (int i = 0; i < device_count(); ++i) generators->push_back(at::make_generator<NpuGenerator>(i));
    return generators;
  }();
  return all->at(device < 0 ? current_device : device);
}

// ---------------------------------------------------------------- hooks
inline void resize_storage(const c10::Storage& storage, size_t size) {
  c10::DeviceGuard guard(storage.device());
  auto resized = device_memory().allocate(size);
  settle();
  const auto kept = std::min(size, storage.nbytes());
  if (kept > 0) std::memcpy(resized.get(), storage.data(), kept);
  storage.set_data_ptr_noswap(std::move(resized));
  storage.set_nbytes(size);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return in_use; }
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(device_count()); }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(current_device); }
  void setCurrentDevice(c10::DeviceIndex index) const override { Guard().setDevice(device_at(index)); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override { return exchangeDevice(index); }

  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    return Guard().exchangeDevice(device_at(index)).index();
  }

  bool isPinnedPtr(const void* address) const override { return pinned_memory().holds(address); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory(); }
  at::Device getDeviceFromPtr(void*) const override { return device_at(current_device); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override { return default_generator(index); }

  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return at::make_generator<NpuGenerator>(index < 0 ? current_device : index);
  }

  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    resize_storage(storage, size);
  }
};

}  // namespace npu_sim
