#define PY_SSIZE_T_CLEAN
#include "calls/fast_path.h"

/* -- usual tensors */

static int is_plain_operand(const fast_path *self, PyObject *tensor, operand *into) {
    if (!is_plain(self->known, tensor, self->device, &into->where, &into->nbytes) || !into->where.bits ||
        !into->where.lanes)
        return 0;
    int32_t dtype = scalar_type(self->known, tensor);
    if (dtype < 0)
        return 0;
    into->itself = tensor, into->dtype = (uint64_t)dtype;
    into->count = into->nbytes * 8 / ((uint64_t)into->where.bits * into->where.lanes);
    return 1;
}

static int are_plain_operands(const fast_path *self, PyObject *const *args, fast_call *call) {
    return is_plain_operand(self, args[0], &call->output) && is_plain_operand(self, args[1], &call->tensor) &&
           call->output.dtype == call->tensor.dtype;
}

/* Whether an op may use both tensors directly: they share no memory, or the smaller one is `part` of the
 * larger one. */
static int overlap_is_allowed(const fast_call *call, const char *part, const operand *smaller) {
    const operand *tensor = &call->tensor, *output = &call->output;
    return tensor->where.data + tensor->nbytes <= output->where.data ||
           output->where.data + output->nbytes <= tensor->where.data ||
           (smaller && part == smaller->where.data);
}

static int divides(const operand *rows, int size) {
    return rows->where.ndim && rows->where.shape[0] % size == 0;
}

/* -- plans */

/* What ranks must agree on beside the tensors, in the words of the slow path, for the journal. */
static PyObject *detail_of(collective op, PyObject *tensor, uint64_t root, PyObject *reduction) {
    switch (op) {
    case ALL_REDUCE:
    case REDUCE_SCATTER:
        return PyObject_GetAttrString(reduction, "name");
    case BROADCAST:
        return PyUnicode_FromFormat("from %lu", (unsigned long)root);
    case ALL_TO_ALL:
        return PyObject_GetAttrString(tensor, "dtype");
    default:
        return Py_NewRef(Py_None);
    }
}

/* A plan for a board: OpPlan of plan.py. */
static int parse_plan(plan *at) {
    PyObject *signature = PyObject_GetAttrString(at->answer, "signature");
    PyObject *kind = signature ? PyObject_GetAttrString(at->answer, "kind") : NULL;
    if (kind)
        at->on_board = (board_op){PyLong_AsUnsignedLongLong(signature), PyLong_AsLong(kind)};
    Py_XDECREF(signature);
    Py_XDECREF(kind);
    if (!PyErr_Occurred() && at->on_board.kind >= 0 && !kernel_of(at->on_board.kind))
        PyErr_SetString(PyExc_ValueError, "no such reduction");
    return PyErr_Occurred() ? -1 : 0;
}

/* Ask Python for a plan and cache it. 0, or -1 with a Python error. */
static int fetch_plan(fast_path *self, plan *at, const fast_call *call, PyObject *reduction) {
    collective op = call->op;
    PyObject *tensor = op == BARRIER ? NULL : call->tensor.itself;
    uint64_t root = (uint64_t)call->src;
    at->what = 0;
    PyObject *answer =
        PyObject_CallFunction(self->planner, "OOKOO", self->names[op], tensor ? tensor : Py_None,
                              (unsigned long long)root, reduction ? reduction : Py_None,
                              call->asynchronous ? Py_True : Py_False);
    PyObject *replaced[] = {at->answer, at->detail, at->reduction};
    at->detail = answer && answer != Py_None ? detail_of(op, tensor, root, reduction) : NULL;
    at->answer = answer, at->reduction = reduction ? Py_NewRef(reduction) : NULL;
    for (int i = 0; i < 3; i++)
        Py_XDECREF(replaced[i]);
    if (!answer || answer == Py_None)
        return answer ? 0 : -1;
    return at->detail && (!self->board || parse_plan(at) == 0) ? 0 : -1;
}

/* The plan of an op; NULL if it is not for a fast path, or with a Python error. */
static const plan *planned(fast_path *self, const fast_call *call, PyObject *reduction) {
    const operand *of = call->op == BARRIER ? NULL : &call->tensor;
    uint64_t form = (uint64_t)call->op | (uint64_t)call->asynchronous << 8, root = (uint64_t)call->src;
    uint64_t what = form << 32 | (of ? of->dtype : 0), count = of ? of->count : 0;
    uint64_t mixed = (what ^ count << 7 ^ root << 20 ^ (uintptr_t)reduction >> 4) * 0x9E3779B97F4A7C15u;
    plan *at = &self->plans[mixed >> 58];
    if (at->what != what || at->count != count || at->root != root || at->reduction != reduction) {
        if (fetch_plan(self, at, call, reduction) < 0)
            return NULL;
        at->what = what, at->count = count, at->root = root;
    }
    return at->answer == Py_None ? NULL : at;
}

/* -- the journal: -1 with a Python error */

static int enter_journal(const fast_path *self, const fast_call *call) {
    if (!self->enter)
        return 0;
    const operand *about = call->op == REDUCE_SCATTER ? &call->output : &call->tensor;
    PyObject *tensor = about->itself && call->op != ALL_TO_ALL ? about->itself : Py_None;
    PyObject *seq = PyLong_FromUnsignedLongLong(self->order->seq + 1),
             *nbytes = PyLong_FromUnsignedLongLong(about->nbytes);
    PyObject *peer = PyLong_FromLong(call->op == BROADCAST ? call->src : -1), *answer = NULL;
    if (seq && nbytes && peer)
        answer = PyObject_CallFunctionObjArgs(self->enter, self->names[call->op], seq, nbytes, tensor,
                                              call->as->detail, peer, NULL);
    PyObject *made[] = {seq, nbytes, peer, answer};
    for (int i = 0; i < 4; i++)
        Py_XDECREF(made[i]);
    return answer ? 0 : -1;
}

static int leave_journal(const fast_path *self, PyObject *error) {
    PyObject *answer =
        self->leave ? PyObject_CallFunctionObjArgs(self->leave, error, NULL) : Py_NewRef(Py_None);
    Py_XDECREF(answer);
    return answer ? 0 : -1;
}

/* -- over a board: if a peer is late, the slow path resumes the same op */

static void cut(span *into, char *at, uint64_t nbytes, int pieces) {
    for (int i = 0; i < pieces; i++)
        into[i].at = at + (uint64_t)i * nbytes, into[i].nbytes = nbytes;
}

/* Put the inputs and outputs of this rank where `run_op` expects them. */
static void lay_out(Board *board, const fast_call *call) {
    char *from = call->tensor.where.data, *to = call->output.where.data;
    uint64_t nbytes = call->tensor.nbytes, part = nbytes / (uint64_t)board->b.size;
    span *give = board->p.give, *take = board->p.take, whole = {from, nbytes};
    int size = board->b.size;
    switch (call->op) {
    case ALL_REDUCE:
    case BROADCAST:
        give[0] = take[0] = whole;
        break;
    case REDUCE_SCATTER:
        cut(give, from, part, size), take[0] = (span){to, part};
        break;
    case ALL_GATHER:
        give[0] = whole, cut(take, to, nbytes, size);
        break;
    case ALL_TO_ALL:
        cut(give, from, part, size), cut(take, to, part, size);
        break;
    default:
        break;
    }
}

static int run_on_board(fast_path *self, fast_call *call) {
    Board *board = self->board;
    if (!board->b.size || atomic_load_explicit(&board->b.stopped, memory_order_relaxed))
        return DECLINED;
    board_op op = call->as->on_board;
    if (enter_journal(self, call) < 0)
        return RAISED;
    lay_out(board, call);
    int end = run_op(board, &op);
    if (end == COMPLETE) {
        self->order->seq++, self->order->joint++;
        return leave_journal(self, Py_None) < 0 ? RAISED : COMPLETED;
    }
    if (end == ERROR)
        PyErr_Clear(); /* the slow path meets the same error again */
    return board->begun > board->number || self->enter ? STARTED : DECLINED;
}

/* -- by a function */

static double monotonic(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* Pass the error of an op to Python, which raises what the caller gets. */
static int raise_failure(fast_path *self, collective op, unsigned long long seq, unsigned long long joint) {
    PyObject *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    PyErr_NormalizeException(&type, &error, &traceback);
    if (traceback)
        PyException_SetTraceback(error, traceback);
    PyObject *nothing = NULL;
    if (leave_journal(self, error) == 0)
        nothing = PyObject_CallFunction(self->failed, "OKKO", self->names[op], seq, joint, error);
    if (nothing)
        PyErr_SetString(PyExc_SystemError, "a failure was not raised");
    Py_XDECREF(nothing);
    Py_XDECREF(type);
    Py_XDECREF(error);
    Py_XDECREF(traceback);
    return RAISED;
}

static int run_function(fast_path *self, fast_call *call) {
    PyObject *deadline = PyFloat_FromDouble(monotonic() + self->timeout), *done;
    if (!deadline || enter_journal(self, call) < 0) {
        Py_XDECREF(deadline);
        return RAISED;
    }
    unsigned long long seq = ++self->order->seq, joint = ++self->order->joint;
    PyObject *function = Py_NewRef(call->as->answer);
    if (call->output.itself)
        done =
            PyObject_CallFunctionObjArgs(function, call->output.itself, call->tensor.itself, deadline, NULL);
    else if (call->tensor.itself)
        done = PyObject_CallFunctionObjArgs(function, call->tensor.itself, deadline, NULL);
    else
        done = PyObject_CallFunctionObjArgs(function, deadline, NULL);
    Py_DECREF(function);
    Py_DECREF(deadline);
    if (!done)
        return raise_failure(self, call->op, seq, joint);
    call->work = done;
    return leave_journal(self, Py_None) < 0 ? RAISED : COMPLETED;
}

static int run_planned(fast_path *self, fast_call *call) {
    return self->board ? run_on_board(self, call) : run_function(self, call);
}

/* -- the ops */

/* Whether the op may use these arguments as they are; fills `call`. */
static int are_usual(fast_path *self, PyObject *const *args, fast_call *call) {
    operand *tensor = &call->tensor, *output = &call->output;
    uint64_t size = (uint64_t)self->size, rank = (uint64_t)self->rank;
    switch (call->op) {
    case ALL_REDUCE:
        return is_plain_operand(self, args[0], tensor);
    case REDUCE_SCATTER:
        return are_plain_operands(self, args, call) && tensor->count == output->count * size &&
               overlap_is_allowed(call, tensor->where.data + rank * output->nbytes, output);
    case BROADCAST:
        call->src = PyLong_CheckExact(args[1]) ? PyLong_AsLong(args[1]) : -1;
        if (call->src == -1)
            PyErr_Clear(); /* it does not fit into a long */
        return call->src >= 0 && call->src < self->size && is_plain_operand(self, args[0], tensor);
    case ALL_GATHER:
        return are_plain_operands(self, args, call) && output->count == tensor->count * size &&
               overlap_is_allowed(call, output->where.data + rank * tensor->nbytes, tensor);
    case ALL_TO_ALL:
        return are_plain_operands(self, args, call) && output->count == tensor->count &&
               overlap_is_allowed(call, NULL, NULL) && divides(output, self->size) &&
               divides(tensor, self->size);
    default:
        return 1;
    }
}

static int find_plan(fast_path *self, PyObject *const *args, fast_call *call) {
    PyObject *reduction = is_reduction(call->op) ? args[usual[call->op].arguments - 1] : NULL;
    call->as = planned(self, call, reduction);
    return call->as != NULL;
}

/* 1; 0 if the op is not for a fast path, or with a Python error: no byte has moved. */
static int plan_call(fast_path *self, PyObject *const *args, fast_call *call) {
    return are_usual(self, args, call) && find_plan(self, args, call);
}

static int is_open(const fast_path *self) {
    const Order *order = self->order;
    return !order->busy && !order->over && !order->queued &&
           is_false(PyObject_GetAttr(self->observers, self->observed));
}

int run_call(fast_path *self, fast_call *call, PyObject *const *args, int unchanged) {
    Order *order = self->order;
    unsigned long here = PyThread_get_thread_ident();
    if (!is_open(self)) {
        order->lost |= order->busy && order->begun_by == here;
        return PyErr_Occurred() ? RAISED : DECLINED;
    }
    order->busy = 1, order->held_by = here;
    int planned_ = unchanged ? find_plan(self, args, call) : plan_call(self, args, call);
    int end = planned_ ? run_planned(self, call) : PyErr_Occurred() ? RAISED : DECLINED;
    if (end == STARTED)
        order->begun_by = here;
    order->busy = end == STARTED;
    if (order->left && end != STARTED) {
        PyObject *done = run_when_left(&order->left);
        Py_XDECREF(done);
        end = done ? end : RAISED;
    }
    return end;
}

/* Run or launch an op. Returns its work: `done` once it is complete, None if it is for the slow path. */
static PyObject *run_collective(fast_path *self, collective op, PyObject *const *args, Py_ssize_t count) {
    int asynchronous = 0;
    if (count != usual[op].arguments + 1) {
        PyErr_Format(PyExc_TypeError, "expected %d arguments, got %zd", usual[op].arguments + 1, count);
        return NULL;
    }
    if (args[count - 1] != Py_False) {
        if ((asynchronous = PyObject_IsTrue(args[count - 1])) < 0)
            return NULL;
        if (asynchronous && self->board)
            Py_RETURN_NONE;
    }
    fast_call call = {.op = op, .asynchronous = asynchronous};
    int end = run_call(self, &call, args, 0);
    if (end == COMPLETED && asynchronous)
        return call.work;
    Py_XDECREF(call.work);
    return end == RAISED ? NULL : Py_NewRef(end == COMPLETED ? self->done : Py_None);
}

#define FAST_OP(NAME, OP)                                                                                    \
    static PyObject *fast_##NAME(fast_path *self, PyObject *const *args, Py_ssize_t count) {                 \
        return run_collective(self, OP, args, count);                                                        \
    }
FAST_OP(all_reduce, ALL_REDUCE)
FAST_OP(reduce_scatter, REDUCE_SCATTER)
FAST_OP(broadcast, BROADCAST)
FAST_OP(all_gather, ALL_GATHER)
FAST_OP(all_to_all, ALL_TO_ALL)
FAST_OP(barrier, BARRIER)

static PyMethodDef fast_methods[] = {
    FAST("all_reduce", fast_all_reduce),
    FAST("reduce_scatter", fast_reduce_scatter),
    FAST("broadcast", fast_broadcast),
    FAST("all_gather", fast_all_gather),
    FAST("all_to_all", fast_all_to_all),
    FAST("barrier", fast_barrier),
    {NULL, NULL, 0, NULL},
};

/* -- creation and release */

static int fast_init(PyObject *object, PyObject *args, PyObject *named) {
    fast_path *self = (fast_path *)object;
    static char *names[] = {"rank",    "size",   "order",  "plan",  "observers", "journal",
                            "timeout", "failed", "device", "board", "done",    NULL};
    state *made = PyType_GetModuleState(Py_TYPE(object));
    PyObject *order, *planner, *observers, *journal, *failed, *board, *done;
    if (!PyArg_ParseTupleAndKeywords(args, named, "iiO!OOOdO(ii)OO", names, &self->rank, &self->size,
                                     made->order, &order, &planner, &observers, &journal, &self->timeout,
                                     &failed, &self->device.kind, &self->device.number, &board, &done))
        return -1;
    if (self->size < 1 || self->rank < 0 || self->rank >= self->size) {
        PyErr_SetString(PyExc_ValueError, "there is no such rank");
        return -1;
    }
    if (board != Py_None && (PyObject *)Py_TYPE(board) != made->board) {
        PyErr_SetString(PyExc_TypeError, "board must be a Board or None");
        return -1;
    }
    self->board = board == Py_None ? NULL : (Board *)Py_NewRef(board);
    self->order = (Order *)Py_NewRef(order), self->known = &made->known;
    self->planner = Py_NewRef(planner), self->observers = Py_NewRef(observers),
    self->failed = Py_NewRef(failed), self->done = Py_NewRef(done);
    self->observed = PyUnicode_InternFromString("observed");
    for (int op = 1; op < COLLECTIVES; op++)
        if (usual[op].name && !(self->names[op] = PyUnicode_InternFromString(usual[op].name)))
            return -1;
    if (journal != Py_None) {
        self->enter = PyObject_GetAttrString(journal, "enter"),
        self->leave = PyObject_GetAttrString(journal, "leave");
        if (!self->enter || !self->leave)
            return -1;
    }
    return self->observed ? 0 : -1;
}

static void fast_dealloc(PyObject *object) {
    fast_path *self = (fast_path *)object;
    PyObject *held[] = {(PyObject *)self->order,
                        (PyObject *)self->board,
                        self->planner,
                        self->observers,
                        self->observed,
                        self->enter,
                        self->leave,
                        self->failed,
                        self->done};
    for (size_t i = 0; i < sizeof held / sizeof *held; i++)
        Py_XDECREF(held[i]);
    for (int op = 0; op < COLLECTIVES; op++)
        Py_XDECREF(self->names[op]);
    for (int i = 0; i < PLANS; i++) {
        Py_XDECREF(self->plans[i].reduction);
        Py_XDECREF(self->plans[i].detail);
        Py_XDECREF(self->plans[i].answer);
    }
    free_object(object);
}

static PyType_Slot fast_slots[] = {
    {Py_tp_init, fast_init},
    {Py_tp_dealloc, fast_dealloc},
    {Py_tp_methods, fast_methods},
    {0, NULL},
};

PyType_Spec fast_spec = {"holdfast.comms._native.FastPath", sizeof(fast_path), 0, Py_TPFLAGS_DEFAULT,
                         fast_slots};
