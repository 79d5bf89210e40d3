/* libfabric with a tcp provider that says it reaches device memory. IT PROVES NOTHING ABOUT HARDWARE.
 *
 * Everything is passed on to the real libfabric (REAL_LIBFABRIC), but for what concerns FI_HMEM: offers have it, and
 * fi_mr_regattr of a dma-buf or of CUDA memory writes down what it was given (not_a_fabric_log) and registers the same
 * addresses as host memory, which the stand-in's "device memory" is. So pages really move, by the real path.
 * Where the device's context is not current, as the stand-in for CUDA's driver has it, nothing is registered.
 * STANDIN_REFUSES: "dmabuf", "hmem" or both are refused. STANDIN_FABRIC_VERSION is what fi_version says: 1.17 knows no dma-bufs.
 * STANDIN_MAX_MR: host memory of more bytes is refused as invalid, as by NICs with such a limit. STANDIN_MORE_MRS: so many more
 * registrations have room from the first one on that sees it.
 */
#include <dlfcn.h>
#include <errno.h>
#include <rdma/fabric.h>
#include <rdma/fi_domain.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#define DMABUF (1ULL << 40)
struct dmabuf {
    int fd;
    uint64_t offset;
    size_t len;
    void* base;
};

static char written[65536];
static struct fi_ops_fabric fabric_ops;
static struct fi_ops_mr mr_ops;
static int (*real_domain)(struct fid_fabric*, struct fi_info*, struct fid_domain**, void*);
static int (*real_reg)(struct fid*, const void*, size_t, uint64_t, uint64_t, uint64_t, uint64_t, struct fid_mr**, void*);

static void* real(const char* name) {
    static void* handle;
    if (!handle) handle = dlopen(getenv("REAL_LIBFABRIC"), RTLD_NOW | RTLD_LOCAL);
    void* found = handle ? dlsym(handle, name) : NULL;
    if (!found) {
        fprintf(stderr, "not_a_fabric: no %s in %s\n", name, getenv("REAL_LIBFABRIC"));
        abort();
    }
    return found;
}

const char* not_a_fabric_log(void) { return written; }

static int is_current(int device) {
    int (*get)(void**) = dlsym(RTLD_DEFAULT, "cuCtxGetCurrent");
    void* context = NULL;
    return get && !get(&context) && (intptr_t)context == 0xc0 + device;
}

static int regattr(struct fid* domain, const struct fi_mr_attr* attr, uint64_t flags, struct fid_mr** mr) {
    const struct dmabuf* dmabuf = (const void*)attr->mr_iov;
    const int by_dmabuf = (flags & DMABUF) != 0;
    void* base = by_dmabuf ? (char*)dmabuf->base + dmabuf->offset : attr->mr_iov->iov_base;
    const size_t len = by_dmabuf ? dmabuf->len : attr->mr_iov->iov_len;
    struct stat about;
    const char* refused = getenv("STANDIN_REFUSES");
    if (refused && strstr(refused, by_dmabuf ? "dmabuf" : "hmem")) return by_dmabuf ? -EOPNOTSUPP : -ENOSYS;
    if (attr->iface != FI_HMEM_CUDA || attr->iov_count != 1) return -EINVAL;
    if (!is_current(attr->device.cuda)) return -ENXIO;
    if (by_dmabuf && (uintptr_t)dmabuf->base % 4096) return -EINVAL;
    if (by_dmabuf && (fstat(dmabuf->fd, &about) || (uint64_t)about.st_size < dmabuf->offset + len)) return -EBADF;
    const size_t used = strlen(written);
    snprintf(written + used, sizeof written - used, "%s cuda:%d %zu+%llu\n", by_dmabuf ? "dmabuf" : "hmem",
             attr->device.cuda, len, by_dmabuf ? (unsigned long long)dmabuf->offset : 0ULL);
    return real_reg(domain, base, len, attr->access, 0, attr->requested_key, 0, mr, NULL);
}

static int reg(struct fid* domain, const void* base, size_t len, uint64_t access, uint64_t offset, uint64_t key,
               uint64_t flags, struct fid_mr** mr, void* context) {
    static long taken;
    const char* max_bytes = getenv("STANDIN_MAX_MR");
    const char* more = getenv("STANDIN_MORE_MRS");
    if (max_bytes && len > strtoul(max_bytes, NULL, 10)) return -EINVAL;
    if (more && taken++ >= atol(more)) return -ENOSPC;
    return real_reg(domain, base, len, access, offset, key, flags, mr, context);
}

static int open_domain(struct fid_fabric* fabric, struct fi_info* info, struct fid_domain** domain, void* context) {
    info->caps &= ~FI_HMEM;
    info->domain_attr->mr_mode &= ~FI_MR_HMEM;
    const int rc = real_domain(fabric, info, domain, context);
    if (rc) return rc;
    mr_ops = *(*domain)->mr;
    real_reg = mr_ops.reg;
    mr_ops.reg = reg;
    mr_ops.regattr = regattr;
    (*domain)->mr = &mr_ops;
    return 0;
}

int fi_fabric(struct fi_fabric_attr* attr, struct fid_fabric** fabric, void* context) {
    int (*call)(struct fi_fabric_attr*, struct fid_fabric**, void*) = real("fi_fabric");
    const int rc = call(attr, fabric, context);
    if (rc) return rc;
    fabric_ops = *(*fabric)->ops;
    real_domain = fabric_ops.domain;
    fabric_ops.domain = open_domain;
    (*fabric)->ops = &fabric_ops;
    return 0;
}

uint32_t fi_version(void) {
    const char* version = getenv("STANDIN_FABRIC_VERSION");
    int major = 1, minor = 20;
    if (version) sscanf(version, "%d.%d", &major, &minor);
    return FI_VERSION(major, minor);
}

struct fi_info* fi_dupinfo(const struct fi_info* info) {
    struct fi_info* (*call)(const struct fi_info*) = real("fi_dupinfo");
    return call(info);
}
void fi_freeinfo(struct fi_info* info) {
    void (*call)(struct fi_info*) = real("fi_freeinfo");
    call(info);
}
const char* fi_strerror(int number) {
    const char* (*call)(int) = real("fi_strerror");
    return call(number);
}
char* fi_tostr(const void* data, enum fi_type type) {
    char* (*call)(const void*, enum fi_type) = real("fi_tostr");
    return call(data, type);
}

int fi_getinfo(uint32_t version, const char* node, const char* service, uint64_t flags, const struct fi_info* hints,
               struct fi_info** list) {
    int (*call)(uint32_t, const char*, const char*, uint64_t, const struct fi_info*, struct fi_info**) = real("fi_getinfo");
    uint32_t (*real_version)(void) = real("fi_version");
    struct fi_info* copy = hints ? fi_dupinfo(hints) : NULL;
    const int device = copy && (copy->caps & FI_HMEM);
    if (device) {
        copy->caps &= ~FI_HMEM;
        copy->domain_attr->mr_mode &= ~FI_MR_HMEM;
    }
    const int rc = call(version < real_version() ? version : real_version(), node, service, flags, copy, list);
    if (copy) fi_freeinfo(copy);
    for (struct fi_info* info = rc ? NULL : *list; device && info; info = info->next) {
        info->caps |= FI_HMEM;
        info->domain_attr->mr_mode |= FI_MR_HMEM;
    }
    return rc;
}
