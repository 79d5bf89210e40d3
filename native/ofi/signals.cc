#include "ofi/signals.h"

#include <array>
#include <mutex>

namespace fkv::ofi {
namespace {

std::mutex mutex;  // of endpoints that are being opened
// By number: what a provider has put where there was no handler.
std::array<void (*)(int), 32> tidies_up{};

}  // namespace

KeptSignals::KeptSignals() {
    for (int number = 1; number < kCount; ++number) known_[number] = sigaction(number, nullptr, &saved_[number]) == 0;
}

KeptSignals::~KeptSignals() {
    for (int number = 1; number < kCount; ++number) {
        struct sigaction now{};
        if (known_[number] && sigaction(number, nullptr, &now) == 0 && now.sa_handler != saved_[number].sa_handler)
            sigaction(number, &saved_[number], nullptr);
    }
}

EndpointSignals::EndpointSignals() {
    mutex.lock();
    for (int i = 0; i < kCount; ++i) {
        sigaction(kNumbers[i], nullptr, &saved_[i]);
        if (saved_[i].sa_handler == SIG_DFL || saved_[i].sa_handler != tidies_up[kNumbers[i]]) continue;
        saved_[i] = {};
        saved_[i].sa_handler = SIG_DFL;
        sigaction(kNumbers[i], &saved_[i], nullptr);
    }
}

EndpointSignals::~EndpointSignals() {
    for (int i = 0; i < kCount; ++i) {
        struct sigaction now{};
        sigaction(kNumbers[i], nullptr, &now);
        if (now.sa_handler == saved_[i].sa_handler) continue;
        if (saved_[i].sa_handler == SIG_DFL)
            tidies_up[kNumbers[i]] = now.sa_handler;
        else
            sigaction(kNumbers[i], &saved_[i], nullptr);
    }
    mutex.unlock();
}

}  // namespace fkv::ofi
