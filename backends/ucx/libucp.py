"""libucp through cffi: the declarations used here, and how the library is found and loaded.

Struct layouts and numbers are those of `ucp/api/ucp.h`, 1.18 to 1.22; UCX grows its structs at their ends, behind field
masks, so an older layout stays valid. Nothing is linked to it. Loading starts no thread and opens no descriptor.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.comms.errors import BackendUnavailable, HoldfastError

INSTALL_HINT = "pip install 'holdfast[ucx]'"
OLDEST = (1, 18, 0)
API = (1, 18)
"""The interface version of the declarations below, passed to `ucp_init_version`."""

OK, IN_PROGRESS = 0, 1
ERR_MESSAGE_TRUNCATED, ERR_BUSY, ERR_LAST = -9, -15, -100
ERR_NO_RESOURCE, ERR_NO_MEMORY, ERR_UNREACHABLE = -2, -4, -6
ERR_NO_DEVICE, ERR_SHMEM_SEGMENT, ERR_EXCEEDS_LIMIT = -14, -17, -21

FEATURE_TAG, FEATURE_WAKEUP, FEATURE_AM = 1 << 0, 1 << 4, 1 << 6
THREADS_SERIALIZED = 1
WORKER_IGNORE_REQUEST_LEAK = 1 << 0
CLOSE_FORCE = 1 << 0
ATTR_CALLBACK, ATTR_USER_DATA, ATTR_FLAGS, ATTR_RECV_INFO = 1 << 1, 1 << 2, 1 << 4, 1 << 7
AM_WHOLE = 1 << 0
AM_REPLY, AM_EAGER, AM_COPY_HEADER = 1 << 0, 1 << 1, 1 << 3
AM_HAS_REPLY_ENDPOINT, AM_IS_RENDEZVOUS = 1 << 0, 1 << 17

CDEF = """
typedef int8_t ucs_status_t;
typedef intptr_t ucs_status_ptr_t;  /* a request, 0 when done, or a negative status */
typedef struct ucp_config ucp_config_t;
typedef struct ucp_context *ucp_context_h;
typedef struct ucp_worker *ucp_worker_h;
typedef struct ucp_ep *ucp_ep_h;
typedef struct ucp_mem *ucp_mem_h;

typedef struct {
    uint64_t field_mask, features;
    size_t request_size;
    void *request_init, *request_cleanup;
    uint64_t tag_sender_mask;
    int mt_workers_shared;
    size_t estimated_num_eps, estimated_num_ppn;
    const char *name;
    size_t node_local_id;
} ucp_params_t;

typedef struct {
    uint64_t field_mask;
    int thread_mode;
    unsigned long cpu_mask[16];
    unsigned events;
    void *user_data;
    int event_fd;
    uint64_t flags;
    const char *name;
    size_t am_alignment;
    uint64_t client_id;
} ucp_worker_params_t;

typedef void (*ucp_err_handler_cb_t)(void *arg, ucp_ep_h ep, ucs_status_t status);

typedef struct {
    uint64_t field_mask;
    const void *address;
    int err_mode;
    struct { ucp_err_handler_cb_t cb; void *arg; } err_handler;
    void *user_data;
    unsigned flags;
    struct { const void *addr; unsigned addrlen; } sockaddr;
    void *conn_request;
    const char *name;
    struct { const void *addr; unsigned addrlen; } local_sockaddr;
} ucp_ep_params_t;

typedef struct { uint64_t sender_tag; size_t length; } ucp_tag_recv_info_t;

typedef struct {
    uint32_t op_attr_mask, flags;
    void *request, *cb;
    uint64_t datatype;
    void *user_data, *reply_buffer;
    int memory_type;
    ucp_tag_recv_info_t *tag_info;
    ucp_mem_h memh;
    uint64_t remote_datatype;
    const void *remote;
    size_t remote_count;
} ucp_request_param_t;

typedef struct { uint64_t recv_attr; ucp_ep_h reply_ep; } ucp_am_recv_param_t;

typedef ucs_status_t (*ucp_am_recv_callback_t)(
    void *arg, const void *header, size_t header_length, void *data, size_t length, const ucp_am_recv_param_t *param);

typedef struct {
    uint64_t field_mask;
    unsigned id;
    uint32_t flags;
    ucp_am_recv_callback_t cb;
    void *arg;
} ucp_am_handler_param_t;

void ucp_get_version(unsigned *major, unsigned *minor, unsigned *release);
ucs_status_t ucp_config_read(const char *prefix, const char *file, ucp_config_t **config);
ucs_status_t ucp_config_modify(ucp_config_t *config, const char *name, const char *value);
void ucp_config_release(ucp_config_t *config);
ucs_status_t ucp_init_version(
    unsigned major, unsigned minor, const ucp_params_t *params, const ucp_config_t *config, ucp_context_h *context);
void ucp_cleanup(ucp_context_h context);

ucs_status_t ucp_worker_create(ucp_context_h context, const ucp_worker_params_t *params, ucp_worker_h *worker);
void ucp_worker_destroy(ucp_worker_h worker);
ucs_status_t ucp_worker_get_address(ucp_worker_h worker, void **address, size_t *length);
void ucp_worker_release_address(ucp_worker_h worker, void *address);
unsigned ucp_worker_progress(ucp_worker_h worker);
ucs_status_t ucp_worker_get_efd(ucp_worker_h worker, int *fd);
ucs_status_t ucp_worker_arm(ucp_worker_h worker);

ucs_status_t ucp_ep_create(ucp_worker_h worker, const ucp_ep_params_t *params, ucp_ep_h *ep);
ucs_status_ptr_t ucp_ep_close_nbx(ucp_ep_h ep, const ucp_request_param_t *param);
ucs_status_ptr_t ucp_ep_flush_nbx(ucp_ep_h ep, const ucp_request_param_t *param);

ucs_status_ptr_t ucp_tag_send_nbx(
    ucp_ep_h ep, uintptr_t buffer, size_t count, uint64_t tag, const ucp_request_param_t *param);
ucs_status_ptr_t ucp_tag_send_sync_nbx(
    ucp_ep_h ep, uintptr_t buffer, size_t count, uint64_t tag, const ucp_request_param_t *param);
ucs_status_ptr_t ucp_tag_recv_nbx(
    ucp_worker_h worker, uintptr_t buffer, size_t count, uint64_t tag, uint64_t mask, const ucp_request_param_t *param);
intptr_t ucp_tag_probe_nb(
    ucp_worker_h worker, uint64_t tag, uint64_t mask, int remove, ucp_tag_recv_info_t *info);
ucs_status_ptr_t ucp_tag_msg_recv_nbx(
    ucp_worker_h worker, uintptr_t buffer, size_t count, intptr_t message, const ucp_request_param_t *param);
ucs_status_t ucp_tag_recv_request_test(intptr_t request, ucp_tag_recv_info_t *info);
ucs_status_t ucp_request_check_status(intptr_t request);
void ucp_request_cancel(ucp_worker_h worker, intptr_t request);
void ucp_request_free(intptr_t request);

ucs_status_t ucp_worker_set_am_recv_handler(ucp_worker_h worker, const ucp_am_handler_param_t *param);
ucs_status_ptr_t ucp_am_send_nbx(
    ucp_ep_h ep, unsigned id, const void *header, size_t header_length, uintptr_t buffer, size_t count,
    const ucp_request_param_t *param);
typedef void (*ucp_am_recv_data_nbx_callback_t)(void *request, ucs_status_t status, size_t length, void *user_data);
ucs_status_ptr_t ucp_am_recv_data_nbx(
    ucp_worker_h worker, void *data, uintptr_t buffer, size_t count, const ucp_request_param_t *param);

const char *ucs_status_string(ucs_status_t status);
void ucs_debug_disable_signals(void);
ucs_status_t ucs_global_opts_set_value(const char *name, const char *value);
"""


class UcxError(HoldfastError):
    """A call of libucp failed. `status` is its `ucs_status_t`."""

    def __init__(self, doing: str, status: int, text: str) -> None:
        self.status = status
        super().__init__(f"UCX failed while {doing}: {text} ({status})")


@dataclass(frozen=True, slots=True)
class Libucp:
    """The loaded library: `ffi` makes C data, `call` has the functions, `version` is for example "1.22.0"."""

    ffi: Any
    call: Any
    version: str
    _ucs: Any

    def text(self, status: int) -> str:
        """A status in the library's words."""
        return str(self.ffi.string(self._ucs.ucs_status_string(status)).decode())

    def check(self, status: int, doing: str) -> None:
        """Raise `UcxError` if `status` (or a request, as `_nbx` functions return) is an error."""
        if ERR_LAST <= status < 0:
            raise UcxError(doing, status, self.text(status))


def _folder() -> Path | None:
    """The folder of the wheel's libraries; None if it is not installed."""
    spec = importlib.util.find_spec("libucx")
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent / "lib"


@functools.cache
def library() -> Libucp:
    """Load libucp: the wheel's, or the system's if there is no wheel. Raises `BackendUnavailable`."""
    try:
        from cffi import FFI
    except ImportError as error:
        raise BackendUnavailable("ucx", "cffi is not installed", INSTALL_HINT) from error
    folder = _folder()
    ffi = FFI()
    ffi.cdef(CDEF)
    try:
        ucs, ucp = (ffi.dlopen(str(folder / name) if folder else name) for name in ("libucs.so.0", "libucp.so.0"))
    except OSError as error:
        raise BackendUnavailable("ucx", f"libucp cannot be loaded: {error}", INSTALL_HINT) from error
    if "UCX_HANDLE_ERRORS" not in os.environ:
        ucs.ucs_debug_disable_signals()
    if "UCX_LOG_LEVEL" not in os.environ:
        ucs.ucs_global_opts_set_value(b"LOG_LEVEL", b"fatal")
    numbers = [ffi.new("unsigned *") for _ in range(3)]
    ucp.ucp_get_version(*numbers)
    version = tuple(int(number[0]) for number in numbers)
    text = ".".join(map(str, version))
    if version < OLDEST:
        raise BackendUnavailable("ucx", f"UCX {text} is older than {'.'.join(map(str, OLDEST))}", INSTALL_HINT)
    return Libucp(ffi, ucp, text, ucs)
