-- Batches: their states, and their answers. One call is one atomic step, and may be carried out twice.
--
-- Answers grow the batch's two files as they come: those that succeeded the output, all others the
-- error file. Each line is answered once, whoever computes it, and how often. The files are listed
-- when the batch ends.
--
-- Keys, all below KEYS[1], beside the files' (files.py; one hash slot). <t>: a tenant
--   <t>:batches              hash    id -> JSON of what was asked (record.py)
--   <t>:batches:open         set     ids of those that have not ended
--   <t>:batch:<id>           hash    status, into (what it ends as), total, completed, failed,
--                                    output and error (bytes), errors (JSON), <status>_at (Unix s)
--   <t>:batch:<id>:answered  string  a bit for each line
--   <t>:index, <t>:bytes, bytes, <t>:file:<id>, expiring   the files'
--
-- ARGV: op, tenant, id, then
--   create  record, input file's id, kept, unfinished  -> "" | no_file | wrong_file | kept | unfinished
--   begin   total                       -> the status that it has now
--   refuse  errors                      validating -> failed
--   stop    into, errors                -> the status that it has now
--   answer  (line, output or error, text)*  -> 1: that were all, and it has ended
--   finish                              -> what it ended as now, or nothing

local root, op, tenant, id = KEYS[1], ARGV[1], ARGV[2], ARGV[3]
local call = redis.call
local now = call('TIME')[1]

local function key(...) return table.concat({root, ...}, ':') end
local BATCHES, OPEN = key(tenant, 'batches'), key(tenant, 'batches', 'open')
local STATE = key(tenant, 'batch', id)
local ANSWERED = key(tenant, 'batch', id, 'answered')
local FILES = {output = 'output_file_id', error = 'error_file_id'}

local function status() return call('HGET', STATE, 'status') end
local function number(field) return tonumber(call('HGET', STATE, field) or 0) end
local function record() return cjson.decode(call('HGET', BATCHES, id)) end
local function turn(into) call('HSET', STATE, 'status', into, into .. '_at', now) end

local function drop(one)
  call('HDEL', BATCHES, one)
  call('DEL', key(tenant, 'batch', one))
end

-- Room for another record: the oldest that has ended goes.
local function make_room(kept)
  if call('HLEN', BATCHES) < kept then return true end
  local ids = call('HKEYS', BATCHES)
  table.sort(ids) -- by their age
  for _, one in ipairs(ids) do
    if call('SISMEMBER', OPEN, one) == 0 then
      drop(one)
      return true
    end
  end
  return false
end

local function list(what, batch)
  local bytes = number(what)
  if bytes == 0 then return end
  local file = batch[FILES[what]]
  local kept_s = batch.output_expires_s
  local ends = kept_s and tonumber(now) + kept_s or nil
  call('HSET', key(tenant, 'index'), file, cjson.encode({id = file, bytes = bytes,
    created_at = tonumber(now), filename = id .. '_' .. what .. '.jsonl', purpose = 'batch_output',
    expires_at = ends}))
  if ends then call('ZADD', key('expiring'), ends, tenant .. ' ' .. file) end
end

local function finish(into)
  local batch = record()
  for what in pairs(FILES) do list(what, batch) end
  turn(into)
  call('SREM', OPEN, id)
  call('DEL', ANSWERED)
  return into
end

local ops = {}

function ops.create(text, input, kept, unfinished)
  if call('HEXISTS', BATCHES, id) == 1 then return '' end
  local file = call('HGET', key(tenant, 'index'), input)
  if not file then return 'no_file' end
  if cjson.decode(file).purpose ~= 'batch' then return 'wrong_file' end
  if call('SCARD', OPEN) >= tonumber(unfinished) then return 'unfinished' end
  if not make_room(tonumber(kept)) then return 'kept' end
  call('HSET', BATCHES, id, text)
  call('SADD', OPEN, id)
  call('HSET', STATE, 'status', 'validating')
  return ''
end

function ops.begin(total)
  if status() == 'validating' then
    turn('in_progress')
    call('HSET', STATE, 'total', total)
  end
  return status() or ''
end

function ops.refuse(errors)
  if status() ~= 'validating' then return end
  call('HSET', STATE, 'errors', errors)
  finish('failed')
end

function ops.stop(into, errors)
  local is = status()
  if is == 'validating' or is == 'in_progress' then
    turn(into == 'cancelled' and 'cancelling' or 'finalizing')
    call('HSET', STATE, 'into', into)
    if errors ~= '' then call('HSET', STATE, 'errors', errors) end
  end
  return status() or ''
end

function ops.answer(...)
  local answers, is = {...}, status()
  if is ~= 'in_progress' and is ~= 'cancelling' and is ~= 'finalizing' then return 0 end
  local batch = record()
  for i = 1, #answers, 3 do
    local line, what, text = answers[i], answers[i + 1], answers[i + 2]
    if call('SETBIT', ANSWERED, line, 1) == 0 then
      call('APPEND', key(tenant, 'file', batch[FILES[what]]), text)
      call('INCRBY', key('bytes'), #text)
      call('INCRBY', key(tenant, 'bytes'), #text)
      call('HINCRBY', STATE, what, #text)
      call('HINCRBY', STATE, what == 'output' and 'completed' or 'failed', 1)
    end
  end
  if is ~= 'in_progress' or number('completed') + number('failed') < number('total') then return 0 end
  turn('finalizing')
  finish('completed')
  return 1
end

function ops.finish()
  local into = call('HGET', STATE, 'into')
  if not into or call('SISMEMBER', OPEN, id) == 0 then return '' end
  return finish(into)
end

return ops[op](unpack(ARGV, 4))
