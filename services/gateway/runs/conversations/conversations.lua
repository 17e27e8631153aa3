-- Conversations: a record and its items. One call is one atomic step.
--
-- Keys, all below KEYS[1] (one hash slot). Ids have no colon, so that no tenant's name can make
-- another's key:
--   :all:<tenant>           zset    conversation -> when it was last used, s
--   :sizes:<tenant>         hash    conversation -> bytes of its record and items
--   :bytes:<tenant>         string  their sum
--   :of:<tenant>:<id>       string  its record (JSON)
--   :items:<tenant>:<id>    hash    item -> JSON
--   :order:<tenant>:<id>    zset    item -> its place, from 1 on
--   :models:<tenant>:<id>   set     those whose answers were added
--   :turns:<tenant>:<id>    hash    request whose turn was added -> the place of its first item
--
-- ARGV: op, kept (s), most (conversations of a tenant), room (their bytes), tenant, conversation, then
--   create   record, (item, JSON)*            -> ok | many | bytes
--   change   before, after                    -> ok | gone | changed | bytes
--   add      most (items), models (JSON), turn, (item, JSON)*  -> ok | gone | items | bytes; `turn`:
--            the request whose turn it is, which is added once, however often it is asked for; or empty
--   drop     item                             -> whether it was there
--   delete                                    -> whether it was there

local root, op = KEYS[1], ARGV[1]
local kept, most, room = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local tenant, id = ARGV[5], ARGV[6]
local call = redis.call
local now = tonumber(call('TIME')[1])

local function key(part, of) return table.concat({root, part, tenant, of}, ':') end

local ALL, SIZES, BYTES = key('all'), key('sizes'), key('bytes')
local OF, ITEMS, ORDER = key('of', id), key('items', id), key('order', id)
local MODELS, TURNS = key('models', id), key('turns', id)

local function forget(conversation)
  local size = tonumber(call('HGET', SIZES, conversation) or 0)
  if size > 0 then call('DECRBY', BYTES, size) end
  call('HDEL', SIZES, conversation)
  call('ZREM', ALL, conversation)
  for _, part in ipairs({'items', 'order', 'models', 'turns'}) do call('DEL', key(part, conversation)) end
  return call('DEL', key('of', conversation))
end

-- Those whose time is over are in nobody's account.
local function tidy()
  for _, old in ipairs(call('ZRANGEBYSCORE', ALL, '-inf', now - kept, 'LIMIT', 0, 100)) do
    forget(old)
  end
end

local function fits(bytes)
  return bytes <= 0 or tonumber(call('GET', BYTES) or 0) + bytes <= room
end

local function grow(bytes)
  call('HINCRBY', SIZES, id, bytes)
  call('INCRBY', BYTES, bytes)
  call('ZADD', ALL, now, id)
  for _, one in ipairs({OF, ITEMS, ORDER, MODELS, TURNS, ALL, SIZES, BYTES}) do
    call('EXPIRE', one, kept)
  end
end

-- Items are read from ARGV, where they are last: a function takes some 8,000 arguments at most.
local FIRST = op == 'add' and 10 or 8

local function size_of_items()
  local bytes = 0
  for n = FIRST, #ARGV do bytes = bytes + #ARGV[n] end
  return bytes
end

-- Returns the place of the first.
local function append_items()
  local place = call('ZREVRANGE', ORDER, 0, 0, 'WITHSCORES')[2] or 0
  for n = FIRST, #ARGV, 2 do
    place = place + 1
    call('HSET', ITEMS, ARGV[n], ARGV[n + 1])
    call('ZADD', ORDER, place, ARGV[n])
  end
  return place - (#ARGV - FIRST + 1) / 2 + 1
end

local ops = {}

function ops.create(record)
  tidy()
  local bytes = #record + size_of_items()
  if call('ZCARD', ALL) >= most then return 'many' end
  if not fits(bytes) then return 'bytes' end
  call('SET', OF, record)
  append_items()
  grow(bytes)
  return 'ok'
end

function ops.change(before, after)
  local stored = call('GET', OF)
  if not stored then return 'gone' end
  if stored ~= before then return 'changed' end
  if not fits(#after - #before) then return 'bytes' end
  call('SET', OF, after)
  grow(#after - #before)
  return 'ok'
end

function ops.add(items_at_most, models, turn)
  tidy()
  local bytes, items = size_of_items(), (#ARGV - FIRST + 1) / 2
  if call('EXISTS', OF) == 0 then return 'gone' end
  if turn ~= '' and call('HEXISTS', TURNS, turn) == 1 then return 'ok' end
  if call('HLEN', ITEMS) + items > tonumber(items_at_most) then return 'items' end
  if not fits(bytes) then return 'bytes' end
  local first = append_items()
  if turn ~= '' then
    call('HSET', TURNS, turn, first)
    bytes = bytes + #turn
  end
  for _, model in ipairs(cjson.decode(models)) do call('SADD', MODELS, model) end
  grow(bytes)
  return 'ok'
end

function ops.drop(item)
  local stored = call('HGET', ITEMS, item)
  if not stored then return 0 end
  call('HDEL', ITEMS, item)
  call('ZREM', ORDER, item)
  grow(-(#item + #stored))
  return 1
end

function ops.delete() return forget(id) end

return ops[op](ARGV[7], ARGV[8], ARGV[9])
