/* SPDX-License-Identifier: Apache-2.0 */
/* The device's own copy: a program may have loaded the device without the core, and the core without the device. */
#include "bus_error.c" /* of rdmanet/abi */
