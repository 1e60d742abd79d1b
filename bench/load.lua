-- Load for `wrk`: sessions of eight turns, each of which sends the whole conversation so far.
-- Arguments: the body's `stream` (true or false), whether calls name their session (true or false), the number of
-- sessions that run at once, and a seed. Several times as many sessions as connections run at once, so that a session's
-- turn is answered before its next one is sent. Prints one line of JSON at the end.

local NUM_TURNS = 8
local SYSTEM = string.rep("You are a careful agent that works step by step. ", 30)
local TASK = string.rep("Do the thing that was asked for, and do it well. ", 10)
local REPLY = string.rep(" word", 100)

local stream, is_marked, sessions, position
local histories = {}

function init(args)
   stream, is_marked, position = args[1], args[2] == "true", 0
   math.randomseed(tonumber(args[4]))
   sessions = {}
   for number = 1, tonumber(args[3]) do
      sessions[number] = { turn = NUM_TURNS }
   end
   histories[1] = ""
   for turn = 2, NUM_TURNS do
      histories[turn] = histories[turn - 1] .. ',{"role":"assistant","content":"' .. REPLY ..
         '"},{"role":"user","content":"Now do step ' .. turn .. '."}'
   end
end

function request()
   position = position % #sessions + 1
   local session = sessions[position]
   if session.turn == NUM_TURNS then
      session.id = string.format("bench-%08x%08x", math.random(0, 2147483647), math.random(0, 2147483647))
      session.turn = 0
   end
   session.turn = session.turn + 1
   local body = '{"model":"canned","messages":[{"role":"system","content":"' .. SYSTEM ..
      '"},{"role":"user","content":"Task ' .. session.id .. ": " .. TASK .. '"}' .. histories[session.turn] ..
      '],"temperature":1.0,"stream":' .. stream .. "}"
   local headers = { ["content-type"] = "application/json", ["authorization"] = "Bearer bench" }
   if is_marked then
      headers["x-session-id"] = session.id
   end
   return wrk.format("POST", "/v1/chat/completions", headers, body)
end

function done(summary, latency)
   local errors = summary.errors.status + summary.errors.connect + summary.errors.read + summary.errors.timeout
   io.write(string.format('\n{"calls": %d, "seconds": %f, "p50_seconds": %f, "errors": %d}\n',
      summary.requests, summary.duration / 1e6, latency:percentile(50) / 1e6, errors))
end
