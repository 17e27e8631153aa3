-- Runs that outlive their connections. One call is one atomic step; each may be carried out twice.
--
-- Keys, all below KEYS[1] (one hash slot). Ids, numbers and hashes have no colon, so that no tenant's
-- name can make another's key:
--   :due                        zset    "tenant:id" -> when its owner is taken for dead, µs
--   :run:<tenant>:<id>          hash    state (runs, ended), owner, body, name, seq, taken, cancel
--   :events:<tenant>:<id>       stream  e: events; one entry for each time that something was written
--   :ids:<tenant>:<id>:<index>  string  the tokens of an answer; only while it runs
--   :all:<tenant>               zset    id -> when it began, s
--   :sizes:<tenant>             hash    id -> bytes
--   :bytes:<tenant>             string  their sum
--   :name:<tenant>:<name>       string  an idempotency key's id and digest
--
-- ARGV: op, kept (s), most (runs of a tenant), room (bytes of a tenant), lease (µs), then
--   begin    tenant, id, owner, body, name, digest  -> begun | same <id> | other | full
--   add      tenant, id, owner, seq, events, (index, ids)*  -> ok | lost | cancelled | full
--   finish   tenant, id, owner, seq, events, forget (1: its name is free again)  -> ok | lost
--   renew    tenant, id, owner  -> ok | lost | cancelled
--   release  tenant, id, owner, after (µs)  -> whoever claims it then has it
--   claim    owner  -> tenant, id, how often it was taken over; or nothing
--   keep     tenant, id, body, events  -> ok | full: a run that is whole already
--   cancel   tenant, id  -> none | ended | cancelled
--   drop     tenant, id  -> how many there were

local root = KEYS[1]
local op = ARGV[1]
local kept, most, room, lease = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local call = redis.call
local time = call('TIME')
local now = tonumber(time[1]) * 1e6 + tonumber(time[2])

local function key(...) return table.concat({root, ...}, ':') end
local function whole(x) return string.format('%.0f', x) end
local DUE = key('due')
local PRUNED = 100 -- old runs at most that one call drops

-- Its name leads to it no more; by then it may be another's.
local function unname(tenant, id)
  local name = call('HGET', key('run', tenant, id), 'name')
  if not name or name == '' then return end
  local at = key('name', tenant, name)
  local holds = call('GET', at)
  if holds and holds:match('^%S+') == id then call('DEL', at) end
end

local function drop(tenant, id)
  local run = key('run', tenant, id)
  unname(tenant, id)
  for index = 0, tonumber(call('HGET', run, 'answers') or 0) - 1 do
    call('DEL', key('ids', tenant, id, whole(index)))
  end
  local size = tonumber(call('HGET', key('sizes', tenant), id) or 0)
  if size > 0 then call('DECRBY', key('bytes', tenant), whole(size)) end
  call('HDEL', key('sizes', tenant), id)
  call('ZREM', key('all', tenant), id)
  call('ZREM', DUE, tenant .. ':' .. id)
  call('DEL', key('events', tenant, id))
  return call('DEL', run)
end

local function fits(tenant, runs, bytes)
  return call('ZCARD', key('all', tenant)) + runs <= most
    and tonumber(call('GET', key('bytes', tenant)) or 0) + bytes <= room
end

-- The oldest that have ended make place for what is new.
local function make_room(tenant, runs, bytes)
  local all = key('all', tenant)
  local function is_over(id) return call('HGET', key('run', tenant, id), 'state') ~= 'runs' end
  local old = call('ZRANGEBYSCORE', all, '-inf', whole(now / 1e6 - kept), 'LIMIT', 0, PRUNED)
  for _, id in ipairs(old) do
    if is_over(id) then drop(tenant, id) end
  end
  if fits(tenant, runs, bytes) then return true end
  for _, id in ipairs(call('ZRANGE', all, 0, -1)) do
    if is_over(id) then
      drop(tenant, id)
      if fits(tenant, runs, bytes) then return true end
    end
  end
  return false
end

local function grow(tenant, id, bytes)
  call('HINCRBY', key('sizes', tenant), id, whole(bytes))
  call('INCRBY', key('bytes', tenant), whole(bytes))
  for _, at in ipairs({'all', 'sizes', 'bytes'}) do call('EXPIRE', key(at, tenant), 2 * kept) end
  call('EXPIRE', key('run', tenant, id), kept)
end

local function write(tenant, id, events)
  if events == '' then return end
  local at = key('events', tenant, id)
  call('XADD', at, '*', 'e', events)
  call('EXPIRE', at, kept)
  grow(tenant, id, #events)
end

local function is_owners(tenant, id, owner)
  local state, holds = unpack(call('HMGET', key('run', tenant, id), 'state', 'owner'))
  return state == 'runs' and holds == owner
end

local function lives_on(tenant, id)
  call('ZADD', DUE, whole(now + lease), tenant .. ':' .. id)
end

local ops = {}

function ops.begin(tenant, id, owner, body, name, digest)
  local run = key('run', tenant, id)
  if call('EXISTS', run) == 1 then return {'begun', id} end
  local at = key('name', tenant, name)
  local holds = name ~= '' and call('GET', at)
  if holds then
    local first, of = holds:match('^(%S+) (%S+)$')
    if call('EXISTS', key('run', tenant, first)) == 1 then
      if of ~= digest then return {'other'} end
      return {'same', first}
    end
  end
  if not make_room(tenant, 1, #body) then return {'full'} end
  call('HSET', run, 'state', 'runs', 'owner', owner, 'body', body, 'name', name, 'seq', 0)
  call('ZADD', key('all', tenant), whole(now / 1e6), id)
  grow(tenant, id, #body)
  if name ~= '' then call('SET', at, id .. ' ' .. digest, 'EX', kept) end
  lives_on(tenant, id)
  return {'begun', id}
end

function ops.add(tenant, id, owner, seq, events, ...)
  local run = key('run', tenant, id)
  if not is_owners(tenant, id, owner) then return 'lost' end
  if call('HEXISTS', run, 'cancel') == 1 then return 'cancelled' end
  lives_on(tenant, id)
  if tonumber(seq) <= tonumber(call('HGET', run, 'seq')) then return 'ok' end
  if not make_room(tenant, 0, #events) then return 'full' end
  call('HSET', run, 'seq', seq)
  write(tenant, id, events)
  local tokens = {...}
  for i = 1, #tokens, 2 do
    local at = key('ids', tenant, id, tokens[i])
    call('APPEND', at, tokens[i + 1])
    call('EXPIRE', at, kept)
    local answers = tonumber(call('HGET', run, 'answers') or 0)
    call('HSET', run, 'answers', whole(math.max(answers, tonumber(tokens[i]) + 1)))
  end
  return 'ok'
end

function ops.finish(tenant, id, owner, seq, events, forget)
  local run = key('run', tenant, id)
  if call('HGET', run, 'state') == 'ended' and call('HGET', run, 'seq') == seq then return 'ok' end
  if not is_owners(tenant, id, owner) then return 'lost' end
  write(tenant, id, events)
  for index = 0, tonumber(call('HGET', run, 'answers') or 0) - 1 do
    call('DEL', key('ids', tenant, id, whole(index)))
  end
  if forget == '1' then
    unname(tenant, id)
    call('HSET', run, 'name', '')
  end
  call('HSET', run, 'state', 'ended', 'seq', seq)
  call('HDEL', run, 'owner', 'answers')
  call('ZREM', DUE, tenant .. ':' .. id)
  return 'ok'
end

function ops.renew(tenant, id, owner)
  if not is_owners(tenant, id, owner) then return 'lost' end
  lives_on(tenant, id)
  return call('HEXISTS', key('run', tenant, id), 'cancel') == 1 and 'cancelled' or 'ok'
end

function ops.release(tenant, id, owner, after)
  if is_owners(tenant, id, owner) then
    call('HSET', key('run', tenant, id), 'owner', '')
    call('ZADD', DUE, whole(now + tonumber(after)), tenant .. ':' .. id)
  end
  return 'ok'
end

function ops.claim(owner)
  while true do
    local due = call('ZRANGEBYSCORE', DUE, '-inf', whole(now), 'LIMIT', 0, 1)[1]
    if not due then return {} end
    local tenant, id = due:match('^(.*):([^:]*)$')
    local run = key('run', tenant, id)
    if call('HGET', run, 'state') == 'runs' then
      local before = call('HGET', run, 'owner')
      local killed = before ~= '' and before ~= owner -- whoever claims its own lives
      call('HSET', run, 'owner', owner)
      lives_on(tenant, id)
      return {tenant, id, whole(call('HINCRBY', run, 'taken', killed and 1 or 0))}
    end
    call('ZREM', DUE, due)
  end
end

function ops.keep(tenant, id, body, events)
  local run = key('run', tenant, id)
  if call('EXISTS', run) == 1 then return 'ok' end
  if not make_room(tenant, 1, #body + #events) then return 'full' end
  call('HSET', run, 'state', 'ended', 'body', body, 'name', '', 'seq', 1)
  call('ZADD', key('all', tenant), whole(now / 1e6), id)
  grow(tenant, id, #body)
  write(tenant, id, events)
  return 'ok'
end

function ops.cancel(tenant, id)
  local run = key('run', tenant, id)
  local state = call('HGET', run, 'state')
  if not state then return 'none' end
  if state == 'ended' then return 'ended' end
  call('HSET', run, 'cancel', 1)
  return 'cancelled'
end

function ops.drop(tenant, id) return drop(tenant, id) end

return ops[op](unpack(ARGV, 6))
