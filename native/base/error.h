// What went wrong, in a form that every layer and Python can use.
//
// Error is thrown while setting up or by a bad argument; the data path returns a PostResult and hands failures
// on as an OpError inside a completion or an event.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace fkv {

enum class ErrorKind : std::uint8_t {
    kConfig,        // wrong argument or option, found before any I/O
    kFabric,        // a libfabric call failed
    kRegistration,  // memory could not be registered
    kUnreachable,   // a peer's address cannot be used
    kWouldBlock,    // a bounded queue is full
    kClosed,        // the owner closed the object
    kProtocol,      // bytes from a peer make no sense
    kStuck,         // a thread has not come back from a NIC
    kInternal,      // our own invariant failed
};

// The failing operation behind an error. Zero and empty fields mean "not known".
struct OpError {
    int fi_errno = 0;    // positive, fi_errno(3)
    int prov_errno = 0;  // the provider's own number
    std::string op;      // "write", "send", "fi_domain" ...
    std::string provider;
    std::string nic;
    std::string text;  // the provider's words
};

class Error : public std::runtime_error {
  public:
    Error(ErrorKind kind, const std::string& message, OpError op = {})
        : std::runtime_error(message), kind_(kind), op_(std::move(op)) {}

    ErrorKind kind() const { return kind_; }
    const OpError& op() const { return op_; }

  private:
    ErrorKind kind_;
    OpError op_;
};

}  // namespace fkv
