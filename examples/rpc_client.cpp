/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Call a service of rdmanet.rpc from C++ over TCP: the Calculator of `examples/rpc.py serve --tcp`.
 *
 * usage: c++ -std=c++17 -o rpc_client examples/rpc_client.cpp && ./rpc_client [HOST] [PORT]
 *
 * Written from docs/reference/rpc-protocol.md: Hello and the server's schema, calls with one result, with an error,
 * with a deadline, and with a stream of results. Of msgpack it has what these need.
 */
#include <cstdint>
#include <cstring>
#include <iostream>
#include <netdb.h>
#include <stdexcept>
#include <string>
#include <sys/socket.h>
#include <unistd.h>
#include <vector>

using std::string;
using std::vector;

// --- msgpack: each kind has one form here that holds all values

static string number(uint64_t value, int size = 8)
{
	string out;
	while (size--)
		out += char(value >> 8 * size);
	return out;
}

static string nil() { return "\xc0"; }
static string whole(uint64_t value) { return "\xcf" + number(value); }
static string text(const string &value) { return "\xdb" + number(value.size(), 4) + value; }
static string bytes(const string &value) { return "\xc6" + number(value.size(), 4) + value; }

static string real(double value)
{
	uint64_t bits;
	memcpy(&bits, &value, sizeof bits);
	return "\xcb" + number(bits);
}

static string list(const vector<string> &items)
{
	string out = "\xdd" + number(items.size(), 4);
	for (const string &item : items)
		out += item;
	return out;
}

struct Value {
	bool is_nil = true;
	uint64_t whole = 0;
	double real = 0;     // of each number
	string text;         // or bytes
	vector<Value> items; // of a list; keys and values of a map
	size_t length = 0;   // in msgpack

	const Value &operator[](size_t at) const // nil at the end may be left out
	{
		static const Value none;
		return at < items.size() ? items[at] : none;
	}
};

class Reader {
	const string &in;
	size_t at = 0;

	uint64_t take(size_t size)
	{
		uint64_t value = 0;
		while (size--)
			value = value << 8 | uint8_t(in.at(at++));
		return value;
	}

	void whole(Value &to, uint64_t value)
	{
		to.whole = value;
		to.real = double(value);
	}

	void negative(Value &to, int size)
	{
		int rest = 64 - 8 * size;
		to.real = double(int64_t(take(size) << rest) >> rest);
	}

	void text(Value &to, size_t size)
	{
		if (size > in.size() - at)
			throw std::out_of_range("a text is longer than its message");
		to.text = in.substr(at, size);
		at += size;
	}

	void items(Value &to, size_t count, int depth)
	{
		while (count--)
			to.items.push_back(read(depth + 1));
	}

public:
	explicit Reader(const string &message) : in(message) {}

	Value read(int depth = 0)
	{
		if (depth > 50)
			throw std::runtime_error("a message is nested too deep");
		Value found;
		size_t begin = at;
		uint8_t head = uint8_t(take(1));
		found.is_nil = head == 0xc0;
		if (head < 0x80)
			whole(found, head);
		else if (head < 0x90)
			items(found, 2 * (head & 15), depth);
		else if (head < 0xa0)
			items(found, head & 15, depth);
		else if (head < 0xc0)
			text(found, head & 31);
		else if (head == 0xc2 || head == 0xc3)
			whole(found, head & 1);
		else if (head >= 0xc4 && head <= 0xc6)
			text(found, take(1 << (head - 0xc4)));
		else if (head == 0xcb) {
			uint64_t bits = take(8);
			memcpy(&found.real, &bits, sizeof bits);
		} else if (head >= 0xcc && head <= 0xcf)
			whole(found, take(1 << (head - 0xcc)));
		else if (head >= 0xd0 && head <= 0xd3)
			negative(found, 1 << (head - 0xd0));
		else if (head >= 0xd9 && head <= 0xdb)
			text(found, take(1 << (head - 0xd9)));
		else if (head == 0xdc || head == 0xdd)
			items(found, take(head == 0xdc ? 2 : 4), depth);
		else if (head == 0xde || head == 0xdf)
			items(found, 2 * take(head == 0xde ? 2 : 4), depth);
		else if (head >= 0xe0)
			found.real = int8_t(head);
		else if (!found.is_nil)
			throw std::runtime_error("a message has something that is not read here");
		found.length = at - begin;
		return found;
	}
};

// --- the connection

enum Kind { HELLO, CALL, REPLY, FAILURE, ITEM, END, WINDOW, GOAWAY = 9, PING, PONG };

static const uint64_t MESSAGE_BYTES = 1 << 20, STREAM_BYTES = 256 << 10, ITEM_BYTES = 64;

class Client {
	int fd;
	Value methods; // of the server's schema
	uint64_t calls = 0;

	void send(const vector<string> &items)
	{
		string body = list(items), frame = number(body.size(), 4) + body;
		for (size_t sent = 0; sent < frame.size();) {
			ssize_t size = ::send(fd, frame.data() + sent, frame.size() - sent, MSG_NOSIGNAL);
			if (size < 0)
				throw std::runtime_error("the connection is lost");
			sent += size_t(size);
		}
	}

	string received(size_t size)
	{
		string data(size, '\0');
		if (recv(fd, &data[0], size, MSG_WAITALL) != ssize_t(size))
			throw std::runtime_error("the connection is lost");
		return data;
	}

	Value receive()
	{
		size_t size = 0;
		for (char each : received(4))
			size = size << 8 | uint8_t(each);
		if (size > MESSAGE_BYTES)
			throw std::runtime_error("the server sends more than it may");
		string body = received(size);
		return Reader(body).read();
	}

	uint64_t place(const string &method)
	{
		for (size_t at = 0; at < methods.items.size(); at++)
			if (methods[at][0].text == method)
				return at;
		throw std::runtime_error("the server has no method " + method);
	}

public:
	Client(const string &host, const string &port, const string &service)
	{
		addrinfo hints = {}, *found = nullptr;
		hints.ai_socktype = SOCK_STREAM;
		if (getaddrinfo(host.c_str(), port.c_str(), &hints, &found))
			throw std::runtime_error("there is no host " + host);
		fd = socket(found->ai_family, found->ai_socktype, 0);
		int failed = connect(fd, found->ai_addr, found->ai_addrlen);
		freeaddrinfo(found);
		if (failed)
			throw std::runtime_error("nobody listens at port " + port + " of " + host);
		send({whole(HELLO), text("rdmanet.rpc"), whole(1), text(service), bytes(string(32, '\0')),
		      whole(MESSAGE_BYTES), whole(1), whole(STREAM_BYTES)});
		Value hello = receive();
		if (hello[0].whole != HELLO || hello[1].text != "rdmanet.rpc" || hello[2].whole != 1)
			throw std::runtime_error("the server does not speak version 1 of rdmanet.rpc");
		if (hello[3].text != service)
			throw std::runtime_error("the server has no service " + service);
		methods = hello[8][0];
	}

	~Client() { close(fd); }

	// Call a method. Returns its result, or the items that it streams.
	vector<Value> call(const string &method, const vector<string> &arguments, uint64_t timeout_us = 0)
	{
		uint64_t call = ++calls, taken = 0, credit = STREAM_BYTES;
		send({whole(CALL), whole(call), whole(place(method)), timeout_us ? whole(timeout_us) : nil(), list(arguments)});
		for (vector<Value> found;;) {
			Value message = receive();
			switch (message[0].whole) {
			case REPLY:
				return {message[2]};
			case FAILURE:
				throw std::runtime_error("code " + std::to_string(message[2].whole) + ": " + message[3].text);
			case ITEM:
				found.push_back(message[2]);
				taken += message[2].length + ITEM_BYTES;
				if (taken + STREAM_BYTES - credit > STREAM_BYTES / 2)
					send({whole(WINDOW), whole(call), whole(credit = taken + STREAM_BYTES)});
				break;
			case END:
				return found;
			case PING:
				send({whole(PONG), whole(message[1].whole)});
				break;
			case GOAWAY: // this call is finished, and there is no next one here
			case WINDOW:
				break;
			default:
				throw std::runtime_error("the server sends a message of an unknown kind");
			}
		}
	}
};

static void failing(Client &client, const string &method, const vector<string> &arguments, uint64_t timeout_us = 0)
{
	try {
		client.call(method, arguments, timeout_us);
	} catch (const std::runtime_error &error) {
		std::cout << method << ": " << error.what() << "\n";
	}
}

int main(int argc, char **argv)
try {
	Client client(argc > 1 ? argv[1] : "127.0.0.1", argc > 2 ? argv[2] : "7473", "Calculator");
	std::cout << "1 + 2.5 = " << client.call("add", {list({real(1), real(2.5)})})[0].real << "\n";
	vector<Value> counted = client.call("count", {whole(20000)});
	std::cout << "counted " << counted.size() << ", the last is " << counted.back().whole << "\n";
	std::cout << client.call("sleep", {real(0.01), text("slept")})[0].text << "\n";
	failing(client, "add", {text("no list")});
	failing(client, "sleep", {real(5), text("never")}, 50000);
} catch (const std::exception &error) {
	std::cerr << error.what() << "\n";
	return 1;
}
