-- Uploads that come in parts. One call is one atomic step: what they take of the room for files
-- changes with what is kept of them.
--
-- Records (JSON) are made by gateways alone, and compared here whole: what changes one is carried
-- out only where nobody else has written it since it was read.
--
-- Keys, all below KEYS[1] (one hash slot):
--   :uploads                zset  "<tenant> <upload>" -> when it expires, Unix s
--   :<tenant>:uploads       hash  upload -> record
--   :<tenant>:upload:<id>   hash  part -> its bytes
--   :blobs, :<tenant>:blobs, :<tenant>:index, :kept, :expiring: files' own (files.py)
--
-- While an upload is pending, the bytes that it announced count as its tenant's.
--
-- ARGV: op, tenant, upload, then
--   create    record, bytes, expires, most (uploads), files, bytes of files, bytes of all tenants'
--                                  -> ok | uploads | files | bytes | all: what has no room
--   add       record, part, bytes, most (parts)      -> ok | changed | parts | bytes
--   complete  before, after, file, its record, its blob, when it expires (''), most (files)
--                                  -> ok | changed | files
--   end       before, after ('': it is forgotten)    -> ok | changed, its parts

local root, op, tenant, id = KEYS[1], ARGV[1], ARGV[2], ARGV[3]
local call = redis.call
local ALL, SUM = root .. ':blobs', root .. ':' .. tenant .. ':blobs'
local INDEX, UPLOADS = root .. ':' .. tenant .. ':index', root .. ':' .. tenant .. ':uploads'
local DUE = root .. ':uploads'

local function parts_of(upload) return root .. ':' .. tenant .. ':upload:' .. upload end
local function name_of(upload) return tenant .. ' ' .. upload end
local function state_of(record) return cjson.decode(record).state end

local function forget(upload)
  call('HDEL', UPLOADS, upload)
  call('DEL', parts_of(upload))
  call('ZREM', DUE, name_of(upload))
end

-- Those that have ended make place for what is new, the oldest first.
local function has_place(most)
  if call('HLEN', UPLOADS) < most then return true end
  local ids = call('HKEYS', UPLOADS)
  table.sort(ids)
  for _, upload in ipairs(ids) do
    if state_of(call('HGET', UPLOADS, upload)) ~= 'pending' then
      forget(upload)
      return true
    end
  end
  return false
end

local function used(key) return tonumber(call('GET', key) or 0) end

local ops = {}

function ops.create(record, bytes, expires, most, files, of_tenant, of_all)
  if call('HLEN', INDEX) >= tonumber(files) then return 'files' end
  if used(SUM) + bytes > tonumber(of_tenant) then return 'bytes' end
  if used(ALL) + bytes > tonumber(of_all) then return 'all' end
  if not has_place(tonumber(most)) then return 'uploads' end
  call('HSET', UPLOADS, id, record)
  call('ZADD', DUE, expires, name_of(id))
  call('INCRBY', ALL, bytes)
  call('INCRBY', SUM, bytes)
  return 'ok'
end

function ops.add(record, part, bytes, most)
  if call('HGET', UPLOADS, id) ~= record then return 'changed' end
  local parts, sum = parts_of(id), tonumber(bytes)
  if call('HLEN', parts) >= tonumber(most) then return 'parts' end
  for _, size in ipairs(call('HVALS', parts)) do sum = sum + size end
  if sum > cjson.decode(record).bytes then return 'bytes' end
  call('HSET', parts, part, bytes)
  return 'ok'
end

function ops.complete(before, after, file, record, blob, expires, files)
  if call('HGET', UPLOADS, id) ~= before then return 'changed' end
  if call('HLEN', INDEX) >= tonumber(files) then return 'files' end
  call('HSET', UPLOADS, id, after)
  call('DEL', parts_of(id))
  call('SADD', root .. ':kept', blob)
  call('HSET', INDEX, file, record)
  if expires ~= '' then call('ZADD', root .. ':expiring', expires, tenant .. ' ' .. file) end
  return 'ok'
end

-- What frees comes first: a full Redis lets a script that has done so go on, and no other.
ops['end'] = function(before, after)
  if call('HGET', UPLOADS, id) ~= before then return {'changed', {}} end
  local record, parts = cjson.decode(before), call('HKEYS', parts_of(id))
  if after == '' then forget(id) else call('DEL', parts_of(id)) end
  if record.state == 'pending' then
    call('DECRBY', ALL, record.bytes)
    call('DECRBY', SUM, record.bytes)
  end
  if after ~= '' then call('HSET', UPLOADS, id, after) end
  return {'ok', parts}
end

return ops[op](unpack(ARGV, 4))
