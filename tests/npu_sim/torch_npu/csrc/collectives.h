// "hccl": gloo on the bytes of npu tensors, on streams of its own, as late as copies are. A call returns at once, and
// so does the wait for it.
#pragma once

#include "operators.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace npu_sim {

using c10::intrusive_ptr;
using c10d::OpType;
using c10d::Work;
using Tensors = std::vector<at::Tensor>;

using Flag = std::shared_ptr<std::atomic<bool>>;

// Where collectives that were given up wait for gloo, which cannot: for no stream, so that nobody waits for them.
inline Queue& limbo() {
  static auto* queue = new Queue();
  return *queue;
}

// Wait until gloo is done, or nobody wants it any more. Then its memory is kept from others until it is.
inline void finish(const intrusive_ptr<Work>& work, const Flag& aborted, const std::vector<void*>& used) {
  while (!aborted->load()) {
    try {
      work->wait(std::chrono::milliseconds(100));
      return;
    } catch (...) {
      if (!work->isCompleted()) continue;
      if (!aborted->load()) work->wait();  // raises what went wrong; not that it was over too late for us
      return;
    }
  }
  const auto over = limbo().post([work] {
    try {
      work->wait();
    } catch (...) {  // nobody is left to be told
    }
  });
  for (auto* address : used) device_memory().hold(address, over);
}

class HcclWork final : public Work {
 public:
  HcclWork(int rank, OpType type, Mark done, c10::Stream lane, Tensors outputs, Flag aborted)
      : Work(rank, type), done_(done), lane_(lane), outputs_(std::move(outputs)), aborted_(std::move(aborted)) {
    future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                       std::vector<c10::Device>{lane.device()});
    c10::StreamGuard guard(lane);
    future_->markCompleted(c10::IValue(outputs_));  // with an event of the lane: who waits for it makes its stream wait
  }

  bool isCompleted() override { return done_.reached(); }
  Tensors result() override { return outputs_; }
  intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

  void synchronize() override { queue_of(current_stream(lane_.device_index())).post_wait(done_); }

  // Later work on the caller's stream comes after it; the caller goes on, unless it said how long it would wait.
  bool wait(std::chrono::milliseconds timeout) override {
    if (timeout != kNoTimeout || retrieveOpType() == OpType::BARRIER) {
      const auto deadline = timeout == kNoTimeout ? Clock::time_point::max() : Clock::now() + timeout;
      TORCH_CHECK(done_.queue->wait_until(done_.ticket, deadline), "hccl: the collective was not over within ",
                  timeout.count(), " ms");
    }
    TORCH_CHECK(!aborted_->load(), "hccl: the communicator was aborted");
    if (done_.reached()) done_.queue->rethrow(done_.ticket);
    synchronize();
    return true;
  }

 private:
  Mark done_;
  c10::Stream lane_;
  Tensors outputs_;
  Flag aborted_;
  intrusive_ptr<c10::ivalue::Future> future_;
};

inline Tensors flat(const at::Tensor& tensor) { return {tensor}; }
inline Tensors flat(const Tensors& tensors) { return tensors; }

inline Tensors flat(const std::vector<Tensors>& lists) {
  Tensors all;
  for (const auto& list : lists) all.insert(all.end(), list.begin(), list.end());
  return all;
}

inline at::Tensor views(const at::Tensor& tensor) {
  static const std::set<at::ScalarType> known{at::kByte, at::kChar,  at::kShort,  at::kInt,      at::kLong,
                                              at::kHalf, at::kFloat, at::kDouble, at::kBFloat16, at::kBool};
  TORCH_CHECK(tensor.device().type() == kNpu, "No backend type associated with device type ", tensor.device().type(),
              ": hccl moves npu tensors only");
  TORCH_CHECK(known.count(tensor.scalar_type()),
              "Unsupported data type for HCCL process group: ", tensor.scalar_type());
  TORCH_CHECK(tensor.is_contiguous(), "Tensors must be contiguous");
  return host_view(tensor);
}

template <typename Each>
std::vector<Each> views(const std::vector<Each>& tensors) {
  std::vector<Each> all;
  for (const auto& each : tensors) all.push_back(views(each));
  return all;
}

class Hccl final : public c10d::Backend {
 public:
  explicit Hccl(intrusive_ptr<c10d::Backend> gloo)
      : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)), lane_(private_stream()) {}

  const std::string getBackendName() const override { return "hccl"; }
  void setTimeout(std::chrono::milliseconds timeout) override { gloo_->setTimeout(timeout); }

  intrusive_ptr<Work> broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return start(OpType::BROADCAST, &Backend::broadcast, tensors, options);
  }

  intrusive_ptr<Work> allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return start(OpType::ALLREDUCE, &Backend::allreduce, tensors, options);
  }

  intrusive_ptr<Work> allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return start(OpType::ALLREDUCE_COALESCED, &Backend::allreduce_coalesced, tensors, options);
  }

  intrusive_ptr<Work> reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    return start(OpType::REDUCE, &Backend::reduce, tensors, options);
  }

  intrusive_ptr<Work> allgather(std::vector<Tensors>& out, Tensors& in,
                                const c10d::AllgatherOptions& options) override {
    return start(OpType::ALLGATHER, &Backend::allgather, out, in, options);
  }

  intrusive_ptr<Work> _allgather_base(at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions& options) override {
    return start(OpType::_ALLGATHER_BASE, &Backend::_allgather_base, out, in, options);
  }

  intrusive_ptr<Work> allgather_into_tensor_coalesced(Tensors& out, Tensors& in,
                                                      const c10d::AllgatherOptions& options) override {
    return start(OpType::COALESCED, &Backend::allgather_into_tensor_coalesced, out, in, options);
  }

  intrusive_ptr<Work> gather(std::vector<Tensors>& out, Tensors& in, const c10d::GatherOptions& options) override {
    return start(OpType::GATHER, &Backend::gather, out, in, options);
  }

  intrusive_ptr<Work> scatter(Tensors& out, std::vector<Tensors>& in, const c10d::ScatterOptions& options) override {
    return start(OpType::SCATTER, &Backend::scatter, out, in, options);
  }

  intrusive_ptr<Work> reduce_scatter(Tensors& out, std::vector<Tensors>& in,
                                     const c10d::ReduceScatterOptions& options) override {
    return start(OpType::REDUCE_SCATTER, &Backend::reduce_scatter, out, in, options);
  }

  intrusive_ptr<Work> _reduce_scatter_base(at::Tensor& out, at::Tensor& in,
                                           const c10d::ReduceScatterOptions& options) override {
    return start(OpType::_REDUCE_SCATTER_BASE, &Backend::_reduce_scatter_base, out, in, options);
  }

  intrusive_ptr<Work> reduce_scatter_tensor_coalesced(Tensors& out, Tensors& in,
                                                      const c10d::ReduceScatterOptions& options) override {
    return start(OpType::REDUCE_SCATTER_TENSOR_COALESCED, &Backend::reduce_scatter_tensor_coalesced, out, in, options);
  }

  intrusive_ptr<Work> alltoall(Tensors& out, Tensors& in, const c10d::AllToAllOptions& options) override {
    return start(OpType::ALLTOALL, &Backend::alltoall, out, in, options);
  }

  intrusive_ptr<Work> alltoall_base(at::Tensor& out, at::Tensor& in, std::vector<int64_t>& out_rows,
                                    std::vector<int64_t>& in_rows, const c10d::AllToAllOptions& options) override {
    auto call = [=, gloo = gloo_, to = views(out), from = views(in)]() mutable {
      return gloo->alltoall_base(to, from, out_rows, in_rows, options);
    };
    return queue_up(OpType::ALLTOALL_BASE, lane_, {out, in}, {out}, std::move(call));
  }

  intrusive_ptr<Work> send(Tensors& tensors, int to, int tag) override {
    auto call = [=, gloo = gloo_, given = views(tensors)]() mutable { return gloo->send(given, to, tag); };
    return queue_up(OpType::SEND, lane_between(sending_, to), tensors, {}, std::move(call));
  }

  intrusive_ptr<Work> recv(Tensors& tensors, int from, int tag) override {
    auto call = [=, gloo = gloo_, given = views(tensors)]() mutable { return gloo->recv(given, from, tag); };
    return queue_up(OpType::RECV, lane_between(receiving_, from), tensors, tensors, std::move(call));
  }

  intrusive_ptr<Work> barrier(const c10d::BarrierOptions& options) override {
    return queue_up(OpType::BARRIER, lane_, {}, {}, [=, gloo = gloo_] { return gloo->barrier(options); });
  }

  // Everything that is under way or queued is over, for streams and for who waits; what is in its memory, nobody knows.
  // But a send or receive that has begun goes on to its end.
  void abort() override { aborted_->store(true); }

  // What was started gets a moment to end: a process that leaves takes its connections with it.
  void shutdown() override {
    const auto deadline = Clock::now() + std::chrono::seconds(5);
    const auto mine = lanes();
    for (const auto& mark : last_marks([&](auto& key) { return mine.count(key.second) > 0; })) {
      mark.queue->wait_until(mark.ticket, deadline);
    }
  }

 private:
  template <typename Method, typename Operands, typename Options>
  intrusive_ptr<Work> start(OpType type, Method method, Operands& operands, const Options& options) {
    auto call = [=, gloo = gloo_, all = views(operands)]() mutable { return (gloo.get()->*method)(all, options); };
    return queue_up(type, lane_, flat(operands), flat(operands), std::move(call));
  }

  template <typename Method, typename Out, typename In, typename Options>
  intrusive_ptr<Work> start(OpType type, Method method, Out& out, In& in, const Options& options) {
    auto call = [=, gloo = gloo_, to = views(out), from = views(in)]() mutable {
      return (gloo.get()->*method)(to, from, options);
    };
    return queue_up(type, lane_, flat(std::vector<Tensors>{flat(out), flat(in)}), flat(out), std::move(call));
  }

  // Behind the caller's stream, on a lane of ours; collectives of one lane run in the order of their calls.
  template <typename Call>
  intrusive_ptr<Work> queue_up(OpType type, int64_t lane_number, const Tensors& used, const Tensors& outputs,
                               Call call) {
    const auto device = used.empty() ? device_at(current_device) : used.front().device();
    const c10::Stream lane(c10::Stream::UNSAFE, device, lane_number);
    auto& queue = queue_of({device.index(), lane_number});
    queue.post_wait(queue_of(current_stream(device.index())).last());
    const auto late = type == OpType::BARRIER ? Clock::duration{} : lateness();  // a barrier keeps the host anyway
    std::vector<void*> addresses;
    for (const auto& tensor : used) addresses.push_back(tensor.storage().mutable_data());
    const bool between_two = type == OpType::SEND || type == OpType::RECV;  // gloo gives up what is waited for in vain
    auto job = [call = std::move(call), aborted = aborted_, addresses = std::move(addresses), between_two]() mutable {
      if (aborted->load()) return;
      if (between_two) {
        call()->wait();
      } else {
        finish(call(), aborted, addresses);
      }
    };
    const auto done = queue.post(std::move(job), late);
    for (const auto& tensor : used) device_memory().recordStream(tensor.storage().data_ptr(), lane);
    return c10::make_intrusive<HcclWork>(getRank(), type, done, lane, outputs, aborted_);
  }

  // One for each neighbour and direction: two ranks that both send first, and then receive, do not wait for each other.
  int64_t lane_between(std::map<int, int64_t>& lanes, int rank) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = lanes.find(rank);
    return found != lanes.end() ? found->second : lanes.emplace(rank, private_stream()).first->second;
  }

  std::set<int64_t> lanes() {
    std::lock_guard<std::mutex> lock(mutex_);
    std::set<int64_t> all{lane_};
    for (const auto& [rank, lane] : sending_) all.insert(lane);
    for (const auto& [rank, lane] : receiving_) all.insert(lane);
    return all;
  }

  intrusive_ptr<c10d::Backend> gloo_;
  Flag aborted_ = std::make_shared<std::atomic<bool>>(false);
  int64_t lane_;
  std::mutex mutex_;
  std::map<int, int64_t> sending_, receiving_;
};

}  // namespace npu_sim
