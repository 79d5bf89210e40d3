#include "engine/receiver.h"

#include <algorithm>

namespace fkv {

void Receiver::count(std::uint32_t word) {
    const auto imm = unpack(word);
    Event event;
    event.group = group_;
    if (imm.slot == kUserSlot) {
        event.kind = Event::kUser;
        event.id = unpack_user(word);
        // A peer may send any number of them, faster than anyone takes them.
        if (events_.inbox_bytes() + sizeof(Event) > max_inbox_bytes_) return stats_.dropped_imms.add(1);
        events_.post(std::move(event));
        return;
    }
    const auto verdict = counters_.add(imm);
    if (verdict == CounterVerdict::kNothing) return;
    if (verdict == CounterVerdict::kStale) return stats_.stale_imms.add(1);
    if (verdict != CounterVerdict::kFired) stats_.violations.add(1);
    if (verdict == CounterVerdict::kLate) return;
    event.kind = Event::kCounter;
    event.verdict = verdict;
    event.slot = imm.slot;
    event.generation = imm.generation;
    events_.post(std::move(event));
}

bool Receiver::deliver(const Op& recv, std::uint64_t nbytes, bool take_data, std::int64_t now) {
    const auto frame = parse_frame({recv.frame, std::min<std::size_t>(nbytes, kFrameBytes)});
    if (!frame) {
        stats_.malformed_frames.add(1);
        return true;
    }
    heartbeat_.heard(frame->header.sender, now);
    if (frame->header.kind == static_cast<std::uint16_t>(FrameKind::kPing)) return true;
    if (frame->header.kind == static_cast<std::uint16_t>(FrameKind::kGoodbye)) {
        if (!farewell_.on_goodbye(frame->header, now)) stats_.malformed_frames.add(1);
        return true;
    }
    if (!take_data || events_.inbox_bytes() + frame->payload.size() > max_inbox_bytes_) return drops_;
    Event event;
    event.kind = Event::kMessage;
    event.peer = frame->header.sender;
    event.id = frame->header.message_id;
    event.bytes = frame->header.total_bytes;
    event.offset = frame->header.offset;
    event.payload.assign(frame->payload.begin(), frame->payload.end());
    events_.post(std::move(event));
    return true;
}

}  // namespace fkv
