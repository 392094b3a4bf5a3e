// Memory of the stand-in: device blocks and pinned blocks, both cached and handed out again as real allocators do.
#pragma once

#include "streams.h"

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <set>
#include <tuple>

namespace npu_sim {

constexpr size_t kMiB = size_t(1) << 20;
constexpr size_t kShareable = size_t(1) << 16;  // blocks from this size up can be opened by other processes
constexpr int kFreshPattern = 0xCB;
constexpr int kFreedPattern = 0xFD;

inline bool poisons() { return setting("NPU_SIM_POISON", 0) != 0; }
inline size_t memory_limit() { return static_cast<size_t>(setting("NPU_SIM_MEMORY", int64_t(4) << 30)); }

inline size_t round_up(size_t size, size_t to) { return (size + to - 1) / to * to; }

inline size_t power_of_two(size_t size, size_t least) {
  while (least < size) least *= 2;
  return least;
}

// The entry of a map by address whose memory holds this address; end if none does.
template <typename Blocks>
typename Blocks::iterator holder_of(Blocks& blocks, const void* address) {
  auto found = blocks.upper_bound(static_cast<char*>(const_cast<void*>(address)));
  if (found == blocks.begin()) return blocks.end();
  --found;
  return static_cast<const char*>(address) < found->first + found->second->size ? found : blocks.end();
}

// Take the block of this address out of those in use.
template <typename Block>
Block* taken_out(std::map<char*, Block*>& live, void* data) {
  const auto found = live.find(static_cast<char*>(data));
  TORCH_INTERNAL_ASSERT(found != live.end());
  auto* block = found->second;
  live.erase(found);
  return block;
}

// Hand on the blocks that nothing queued uses any more; the others stay held.
template <typename Block, typename HandOn>
void release_unused(std::vector<Block*>& held, HandOn hand_on) {
  auto still_used = [](const Block* block) {
    return std::any_of(block->uses.begin(), block->uses.end(), [](auto& use) { return !use.reached(); });
  };
  const auto first_free = std::stable_partition(held.begin(), held.end(), still_used);
  for (auto at = first_free; at != held.end(); ++at) {
    (*at)->uses.clear();
    hand_on(*at);
  }
  held.erase(first_free, held.end());
}

// ---------------------------------------------------------------- what others see of this process
// Note that it works on a device: as an open file, whose name `npu-smi` reads.
inline void open_context(int device) {
  static std::mutex mutex;
  static std::set<int> opened;
  std::lock_guard<std::mutex> lock(mutex);
  if (!opened.insert(device).second) return;
  const auto name = "npu-context-" + std::to_string(device);
  TORCH_CHECK(syscall(SYS_memfd_create, name.c_str(), 1U) >= 0, "npu stand-in: memfd_create failed");
}

// ---------------------------------------------------------------- device memory
struct DeviceBlock {
  char* data;
  size_t size;
  StreamKey stream;  // on which it was asked for first, and will be given out again
  int fd;            // of its memory, or -1
  size_t counted = 0;
  std::set<StreamKey> also_used_on{};
  std::vector<Mark> uses{};  // what must be over before it is given out again
  Mark last{};               // what must be over before its memory goes back to the system
};

// Blocks that are let go of are given out again at once, to the stream they were asked for on, and without any wait:
// only the order of that stream protects them, and whoever uses them on another must say so (record_stream) or wait.
class DeviceMemory final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t size) override {
    use_device();
    const auto device = device_at(current_device);
    if (size == 0) return {nullptr, nullptr, &let_go, device};
    const auto stream = current_stream(current_device);
    const auto block_size = size < kMiB ? power_of_two(size, 512) : round_up(size, 2 * kMiB);
    std::unique_lock<std::mutex> lock(mutex_);
    reclaim();
    auto* block = cached(stream, block_size);
    if (block == nullptr) {
      make_room(lock, size, block_size);
      block = fresh(stream, block_size);
    }
    block->counted = round_up(size, 512);
    bytes(stats_[current_device].allocated_bytes).increase(block->counted);
    live_[block->data] = block;
    return {block->data, block->data, &let_go, device};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &let_go; }

  void copy_data(void* to, const void* from, size_t size) const override {
    settle();
    std::memcpy(to, from, size);
  }

  bool initialized() override { return in_use; }

  void emptyCache(c10::MempoolId_t = {0, 0}) override {
    for (int device = 0; device < device_count(); ++device) drain(device);
    std::lock_guard<std::mutex> lock(mutex_);
    reclaim();
    for (int device = 0; device < device_count(); ++device) release_cached(device);
  }

  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = live_.find(static_cast<char*>(pointer.get()));
    const StreamKey key{stream.device_index(), stream.id()};
    if (found != live_.end() && found->second->stream != key) found->second->also_used_on.insert(key);
  }

  // The block of this address, in use or let go of, is not given out again before that.
  void hold(void* address, const Mark& use) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto live = live_.find(static_cast<char*>(address));
    if (live != live_.end()) live->second->uses.push_back(use);
    for (auto* block : held_) {
      if (block->data == address) block->uses.push_back(use);
    }
  }

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(mutex_);
    return stats_[device];
  }

  void resetAccumulatedStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(mutex_);
    bytes(stats_[device].allocated_bytes).reset_accumulated();
    bytes(stats_[device].reserved_bytes).reset_accumulated();
  }

  void resetPeakStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(mutex_);
    bytes(stats_[device].allocated_bytes).reset_peak();
    bytes(stats_[device].reserved_bytes).reset_peak();
  }

  // As a driver counts: what the allocator keeps for later is not free.
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto total = memory_limit();
    const auto reserved = reserved_on(device);
    return {total > reserved ? total - reserved : 0, total};
  }

  // The file and size of the block that holds this address, for another process to map.
  std::tuple<int, size_t, size_t> shared_file(const void* address) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = holder_of(live_, address);
    TORCH_CHECK(found != live_.end() && found->second->fd >= 0, "npu stand-in: only allocations of ", kShareable,
                " bytes and more can be shared between processes");
    return {found->second->fd, found->second->size, static_cast<const char*>(address) - found->first};
  }

 private:
  static void let_go(void* data);

  void take_back(void* data) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto* block = taken_out(live_, data);
    bytes(stats_[block->stream.first].allocated_bytes).decrease(block->counted);
    for (const auto& key : block->also_used_on) block->uses.push_back(queue_of(key).last());
    block->also_used_on.clear();
    held_.push_back(block);
    reclaim();
  }

  // Put what no other stream uses any more back on the list of its own, where it is overwritten in that stream's order.
  void reclaim() {
    release_unused(held_, [this](DeviceBlock* block) {
      auto& queue = queue_of(block->stream);
      block->last =
          poisons() ? queue.post([data = block->data, size = block->size] { std::memset(data, kFreedPattern, size); })
                    : queue.last();
      cached_[{block->stream, block->size}].push_back(block);
    });
  }

  DeviceBlock* cached(StreamKey stream, size_t size) {
    auto& blocks = cached_[{stream, size}];
    if (blocks.empty()) return nullptr;
    auto* block = blocks.back();
    blocks.pop_back();
    return block;
  }

  void make_room(std::unique_lock<std::mutex>& lock, size_t asked, size_t size) {
    const int device = current_device;
    if (reserved_on(device) + size <= memory_limit()) return;
    lock.unlock();
    drain(device);
    lock.lock();
    reclaim();
    release_cached(device);
    const auto reserved = reserved_on(device);
    const auto total = memory_limit();
    TORCH_CHECK_WITH(OutOfMemoryError, reserved + size <= total, "NPU out of memory. Tried to allocate ", asked,
                     " bytes. NPU ", device, " has a total capacity of ", total, " bytes of which ",
                     total > reserved ? total - reserved : 0, " are free.");
  }

  DeviceBlock* fresh(StreamKey stream, size_t size) {
    open_context(stream.first);
    void* data = nullptr;
    int fd = -1;
    if (size >= kShareable) {
      fd = static_cast<int>(syscall(SYS_memfd_create, "npu", 1U));  // 1: not inherited by programs that are started
      TORCH_CHECK(fd >= 0 && ftruncate(fd, static_cast<off_t>(size)) == 0, "npu stand-in: memfd_create failed");
      data = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
      TORCH_CHECK(data != MAP_FAILED, "npu stand-in: mmap failed");
    } else {
      TORCH_CHECK(posix_memalign(&data, 512, size) == 0, "npu stand-in: the host is out of memory");
    }
    if (poisons()) std::memset(data, kFreshPattern, size);
    bytes(stats_[stream.first].reserved_bytes).increase(size);
    return new DeviceBlock{static_cast<char*>(data), size, stream, fd};
  }

  // Give cached memory back to the system, except where something is still queued on it.
  void release_cached(int device) {
    for (auto& [key, blocks] : cached_) {
      if (key.first.first != device) continue;
      const auto first_idle =
          std::stable_partition(blocks.begin(), blocks.end(), [](auto* b) { return !b->last.reached(); });
      for (auto at = first_idle; at != blocks.end(); ++at) release(*at);
      blocks.erase(first_idle, blocks.end());
    }
  }

  void release(DeviceBlock* block) {
    bytes(stats_[block->stream.first].reserved_bytes).decrease(block->size);
    if (block->fd >= 0) {
      munmap(block->data, block->size);
      close(block->fd);
    } else {
      std::free(block->data);
    }
    delete block;
  }

  static c10::CachingAllocator::Stat& bytes(c10::CachingAllocator::StatArray& stats) {
    return stats[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)];
  }

  size_t reserved_on(int device) { return static_cast<size_t>(bytes(stats_[device].reserved_bytes).current); }

  std::mutex mutex_;
  std::map<char*, DeviceBlock*> live_;
  std::vector<DeviceBlock*> held_;
  std::map<std::pair<StreamKey, size_t>, std::vector<DeviceBlock*>> cached_;
  std::map<int, c10::CachingDeviceAllocator::DeviceStats> stats_;
};

inline DeviceMemory& device_memory() {
  static auto* memory = new DeviceMemory();
  return *memory;
}

inline void DeviceMemory::let_go(void* data) {
  if (data != nullptr && !forked) device_memory().take_back(data);
}

// Memory of another process, mapped here.
struct Imported {
  void* data;
  size_t size;
  int device;
};

inline c10::DataPtr import_memory(int fd, size_t size, int device) {
  void* data = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  TORCH_CHECK(data != MAP_FAILED, "npu stand-in: mmap failed");
  auto unmap = [](void* context) {
    const std::unique_ptr<Imported> mapped(static_cast<Imported*>(context));
    if (forked) return;
    for (auto& mark : last_marks([&](auto& key) { return key.first == mapped->device; }))
      mark.queue->finish(mark.ticket);
    munmap(mapped->data, mapped->size);
  };
  return {data, new Imported{data, size, device}, unmap, device_at(device)};
}

// ---------------------------------------------------------------- pinned host memory
struct PinnedBlock {
  char* data;
  size_t size;
  std::vector<Mark> uses{};  // copies that were queued on it
};

// Blocks are cached, and given out again when the copies that were queued on them are over. The tensor's owner has no
// such protection: what it writes while a copy is pending, the copy may read.
class PinnedMemory final : public at::HostAllocator {
 public:
  c10::DataPtr allocate(size_t size) override {
    use_device();
    const auto block_size = power_of_two(size, 4096);
    std::lock_guard<std::mutex> lock(mutex_);
    reclaim();
    auto& blocks = cached_[block_size];
    auto* block = blocks.empty() ? fresh(block_size) : blocks.back();
    if (!blocks.empty()) blocks.pop_back();
    live_[block->data] = block;
    return {block->data, block->data, &let_go, c10::Device(c10::kCPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &let_go; }

  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }

  bool record_event(void* data, void*, c10::Stream stream) override {
    return record(data, queue_of({stream.device_index(), stream.id()}).last());
  }

  // The block that holds this address is used until then. False: none does.
  bool record(const void* address, const Mark& use) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = holder_of(live_, address);
    if (found == live_.end()) return false;
    auto& uses = found->second->uses;
    uses.erase(std::remove_if(uses.begin(), uses.end(), [&](auto& old) { return old.queue == use.queue; }), uses.end());
    uses.push_back(use);
    return true;
  }

  bool holds(const void* address) {
    std::lock_guard<std::mutex> lock(mutex_);
    return holder_of(live_, address) != live_.end();
  }

  void empty_cache() override {
    std::lock_guard<std::mutex> lock(mutex_);
    reclaim();
    for (auto& [size, blocks] : cached_) {
      for (auto* block : blocks) {
        std::free(block->data);
        delete block;
      }
    }
    cached_.clear();
  }

  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}

 private:
  static void let_go(void* data);

  void take_back(void* data) {
    std::lock_guard<std::mutex> lock(mutex_);
    held_.push_back(taken_out(live_, data));
    reclaim();
  }

  void reclaim() {
    release_unused(held_, [this](PinnedBlock* block) {
      if (poisons()) std::memset(block->data, kFreedPattern, block->size);
      cached_[block->size].push_back(block);
    });
  }

  static PinnedBlock* fresh(size_t size) {
    void* data = nullptr;
    TORCH_CHECK(posix_memalign(&data, 4096, size) == 0, "npu stand-in: the host is out of memory");
    if (poisons()) std::memset(data, kFreshPattern, size);
    return new PinnedBlock{static_cast<char*>(data), size};
  }

  std::mutex mutex_;
  std::map<char*, PinnedBlock*> live_;
  std::vector<PinnedBlock*> held_;
  std::map<size_t, std::vector<PinnedBlock*>> cached_;
};

inline PinnedMemory& pinned_memory() {
  static auto* memory = new PinnedMemory();
  return *memory;
}

inline void PinnedMemory::let_go(void* data) {
  if (data != nullptr && !forked) pinned_memory().take_back(data);
}

}  // namespace npu_sim
