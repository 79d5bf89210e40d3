// Starts the engine's threads: named, pinned, and with naps that end on time.
#pragma once

#include <functional>
#include <string>
#include <thread>
#include <vector>

namespace fkv {

// Runs fn on a thread that may use these cpus only; empty: any. Throws Error(kConfig) for a cpu that this process may
// not use. Of the name 15 characters are kept.
std::thread start_thread(const std::string& name, const std::vector<int>& cpus, std::function<void()> fn);

}  // namespace fkv
