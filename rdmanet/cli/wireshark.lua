-- SPDX-License-Identifier: Apache-2.0
-- Shows the files of `rdmanet trace --output FILE.pcapng` in Wireshark and tshark. pcapng.py has the format.
--
--     tshark -X lua_script:"$(rdmanet trace --dissector)" -r FILE.pcapng -Y 'rdmanet.credits == 0'
--
-- Wireshark takes it from its folder of plugins (Help, About Wireshark, Folders).

local FORMAT, HEADER_BYTES = 1, 48
local DIRECTIONS = { [0] = "none", [1] = "sent", [2] = "received" }

local rdmanet = Proto("rdmanet", "rdmanet trace")
local fields = rdmanet.fields
fields.format = ProtoField.uint8("rdmanet.format", "Format")
fields.direction = ProtoField.uint8("rdmanet.direction", "Direction", base.DEC, DIRECTIONS)
fields.name_bytes = ProtoField.uint16("rdmanet.name_bytes", "Length of the name")
fields.pid = ProtoField.uint32("rdmanet.pid", "Process")
fields.qp = ProtoField.uint32("rdmanet.qp", "Queue pair", base.HEX)
fields.peer = ProtoField.uint32("rdmanet.peer", "Peer's queue pair", base.HEX)
fields.credits = ProtoField.uint32("rdmanet.credits", "Credits")
fields.frame = ProtoField.uint64("rdmanet.frame", "Number of the data frame")
fields.bytes = ProtoField.uint64("rdmanet.bytes", "Bytes")
fields.duration = ProtoField.uint64("rdmanet.duration", "Duration in ns")
fields.event = ProtoField.string("rdmanet.event", "Event")

function rdmanet.dissector(buffer, pinfo, tree)
    if buffer:len() < HEADER_BYTES or buffer(0, 1):uint() ~= FORMAT then
        return 0
    end
    local name_bytes = math.min(buffer(2, 2):le_uint(), buffer:len() - HEADER_BYTES)
    local name = buffer(HEADER_BYTES, name_bytes)
    local event = name:string(ENC_UTF_8)
    local part = tree:add(rdmanet, buffer(), "rdmanet: " .. event)
    part:add(fields.format, buffer(0, 1))
    part:add(fields.direction, buffer(1, 1))
    part:add_le(fields.name_bytes, buffer(2, 2))
    part:add_le(fields.pid, buffer(4, 4))
    part:add_le(fields.qp, buffer(8, 4))
    part:add_le(fields.peer, buffer(12, 4))
    part:add_le(fields.credits, buffer(16, 4))
    part:add_le(fields.frame, buffer(24, 8))
    part:add_le(fields.bytes, buffer(32, 8))
    part:add_le(fields.duration, buffer(40, 8))
    part:add_packet_field(fields.event, name, ENC_UTF_8)

    local ours = string.format("0x%x", buffer(8, 4):le_uint())
    local theirs = string.format("0x%x", buffer(12, 4):le_uint())
    local has_come = buffer(1, 1):uint() == 2
    pinfo.cols.protocol = "rdmanet"
    pinfo.cols.src = has_come and theirs or ours
    pinfo.cols.dst = has_come and ours or theirs
    pinfo.cols.info = string.format("%s, %s bytes, credits %d", event, tostring(buffer(32, 8):le_uint64()),
                                    buffer(16, 4):le_uint())
    return buffer:len()
end

DissectorTable.get("wtap_encap"):add(wtap.USER0, rdmanet)
