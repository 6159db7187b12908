/* One Ethernet frame as it is read from a TAP device, with what the emulated wire needs to know of it. */
#ifndef TWINBED_FRAME_H
#define TWINBED_FRAME_H

#include <stddef.h>
#include <stdint.h>

#define FRAME_MAX_BYTES (68 * 1024) /* virtio header + Ethernet header + the largest IPv4 packet */
#define NUM_FLOWS 65536             /* hash buckets: 20 flows on a link collide with a chance of 0.3% */

struct frame {
    struct frame *next; /* the one behind it in the queue of its flow */
    int src, dst;       /* ports */
    int64_t wire_bytes; /* on the emulated wire: a frame that the kernel left uncut counts as its segments */
    int64_t sending_ns; /* how long the link that it crossed last was busy with it */
    size_t num_bytes;   /* of data */
    unsigned char data[]; /* struct virtio_net_hdr, then the Ethernet frame */
};

/* A copy of `data`; NULL when it is too short to be a frame, or memory is out. */
struct frame *frame_new(const unsigned char *data, size_t num_bytes, int src);

/* The port that the frame is addressed to, or -1. Node i has the address 02:00:00:00:hh:ll with hhll = i + 1. */
int frame_destination(const struct frame *frame);

/* Bucket of the frame's flow: addresses and ports of TCP and UDP over IPv4; all else shares bucket 0. */
unsigned frame_flow(const struct frame *frame);

#endif
