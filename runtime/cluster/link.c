#include "link.h"

#include <stdlib.h>

#define QUANTUM_BYTES 16384 /* a flow's share of a round: one uncut frame (the nodes cap them at this size) */

struct link *link_new(double rate_Bps, int64_t latency_ns, int64_t limit_bytes, bool down)
{
    struct link *link = calloc(1, sizeof *link); /* untouched buckets never become real memory */
    if (link == NULL)
        return NULL;
    link->rate_Bps = rate_Bps;
    link->latency_ns = latency_ns;
    link->limit_bytes = limit_bytes;
    link->down = down;
    link->fresh = link->old = (struct flow_list){-1, -1};
    return link;
}

static void append(struct link *link, struct flow_list *list, int flow)
{
    link->flows[flow].next = -1;
    if (list->tail >= 0)
        link->flows[list->tail].next = flow;
    else
        list->head = flow;
    list->tail = flow;
}

static void drop_head(struct link *link, struct flow_list *list)
{
    list->head = link->flows[list->head].next;
    if (list->head < 0)
        list->tail = -1;
}

bool link_queue(struct link *link, struct frame *frame)
{
    if (link->queued_bytes + frame->wire_bytes > link->limit_bytes)
        return false;
    int index = (int)frame_flow(frame);
    struct flow *flow = &link->flows[index];
    frame->next = NULL;
    if (flow->tail != NULL)
        flow->tail->next = frame;
    else
        flow->head = frame;
    flow->tail = frame;
    link->queued_bytes += frame->wire_bytes;
    if (link->queued_bytes > link->most_queued_bytes)
        link->most_queued_bytes = link->queued_bytes;
    if (!flow->listed) {
        flow->listed = true;
        flow->deficit_bytes = QUANTUM_BYTES;
        append(link, &link->fresh, index);
    }
    return true;
}

/* Whose turn it is; NULL when nothing waits. */
static struct frame *next_frame(struct link *link)
{
    for (;;) {
        struct flow_list *list = link->fresh.head >= 0 ? &link->fresh : &link->old;
        int index = list->head;
        if (index < 0)
            return NULL;
        struct flow *flow = &link->flows[index];
        if (flow->head == NULL) {
            drop_head(link, list);
            /* A fresh flow that ran empty waits one round among the old ones: else a flow that sends single frames
               would be fresh each time and starve the rest. */
            if (list == &link->fresh)
                append(link, &link->old, index);
            else
                flow->listed = false;
        } else if (flow->deficit_bytes <= 0) {
            drop_head(link, list);
            flow->deficit_bytes += QUANTUM_BYTES;
            append(link, &link->old, index);
        } else {
            struct frame *frame = flow->head;
            flow->head = frame->next;
            if (flow->head == NULL)
                flow->tail = NULL;
            flow->deficit_bytes -= frame->wire_bytes;
            link->queued_bytes -= frame->wire_bytes;
            return frame;
        }
    }
}

bool link_start(struct link *link, int64_t now_ns, int64_t *sent_ns)
{
    if (link->sending != NULL)
        return false;
    struct frame *frame = next_frame(link);
    if (frame == NULL)
        return false;
    int64_t start_ns = now_ns, busy_ns = (int64_t)((double)frame->wire_bytes * 1e9 / link->rate_Bps);
    if (link->down) {
        /* Cut-through: the first bit came in sending_ns before the last one, and could go on at once. So a lone frame
           pays its length once, not per hop, and two links in a row act as a fluid does. */
        int64_t first_bit_ns = now_ns - frame->sending_ns;
        start_ns = link->free_ns > first_bit_ns ? link->free_ns : first_bit_ns;
    }
    *sent_ns = start_ns + busy_ns > now_ns ? start_ns + busy_ns : now_ns;
    link->free_ns = *sent_ns;
    link->sending = frame;
    frame->sending_ns = busy_ns;
    return true;
}

struct frame *link_sent(struct link *link)
{
    struct frame *frame = link->sending;
    link->sending = NULL;
    return frame;
}
