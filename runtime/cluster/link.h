/*
 * One direction of a node's cable: a rate, a latency and a queue that is fair between flows.
 *
 * The queue is deficit round robin (Shreedhar and Varghese, 1995) in bytes over TCP flows, and flows that were idle
 * go first, as in fq_codel (RFC 8290). So flows share the link max-min fairly, and acknowledgements and small control
 * messages do not wait behind bulk data.
 */
#ifndef TWINBED_LINK_H
#define TWINBED_LINK_H

#include <stdbool.h>
#include <stdint.h>

#include "frame.h"

struct flow {
    struct frame *head, *tail;
    int64_t deficit_bytes; /* what it may still send in this round */
    int next;              /* flow behind it on its list */
    bool listed;
};

struct flow_list {
    int head, tail; /* -1: empty */
};

struct link {
    double rate_Bps;
    int64_t latency_ns;
    bool down;             /* switch to node; else node to switch */
    struct frame *sending; /* NULL: idle */
    int64_t free_ns;       /* when the last frame ended */
    int64_t queued_bytes, most_queued_bytes, limit_bytes;
    struct flow_list fresh, old; /* flows with frames: those that were idle until now, and the rest */
    struct flow flows[NUM_FLOWS];
};

/* NULL when memory is out. */
struct link *link_new(double rate_Bps, int64_t latency_ns, int64_t limit_bytes, bool down);

/* Queues the frame; false, and the frame still the caller's, when the queue is full. */
bool link_queue(struct link *link, struct frame *frame);

/*
 * If the link is idle and a frame waits, takes it as link->sending. `now_ns` is when the frame became sendable.
 * True: *sent_ns is when its last bit leaves.
 */
bool link_start(struct link *link, int64_t now_ns, int64_t *sent_ns);

/* The frame that was sent, now the caller's; the link is idle. */
struct frame *link_sent(struct link *link);

#endif
