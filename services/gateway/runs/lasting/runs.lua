-- Runs that outlive their connections. One call is one atomic step; each may be carried out twice.
--
-- A run has one owner at a time, by an epoch: whoever takes it over has it by the next one, and what
-- is written by an epoch before is not taken. Until its first write nobody has been told of it, so
-- one that nobody owns then is dropped and not run.
--
-- Keys, all below KEYS[1] (one hash slot). Ids, numbers and hashes have no colon, so that no tenant's
-- name can make another's key:
--   :due                        zset    "tenant:id" -> when its owner is taken for dead, µs
--   :run:<tenant>:<id>          hash    state (runs, ended), owner, epoch, body, name, seq, taken, cancelled, sealed,
--                                       about (what lists tell of it; only of those that are in some)
--   :events:<tenant>:<id>       stream  <seq>-0 -> e: events; one entry for each write
--   :ids:<tenant>:<id>:<index>  string  the tokens of an answer; only while it runs
--   :all:<tenant>               zset    id -> when it began, s
--   :sizes:<tenant>             hash    id -> bytes
--   :bytes:<tenant>             string  their sum
--   :name:<tenant>:<name>       string  an idempotency key's id and digest
--   :told:<tenant>:<id>         channel "seq events" of each write; "" when the run is gone
--
-- ARGV: op, kept (s), most (runs of a tenant), room (bytes of a tenant), lease (µs), then
--   begin    tenant, id, owner, body, name, digest, resumes, about  -> begun (epoch 1) | same <id> | other | full | none:
--            `resumes` (1 or 0): its client has events of it already, so it must be there
--   add      tenant, id, epoch, seq, events, (index, ids)*  -> ok | lost | cancelled | full
--   seal     tenant, id, epoch  -> ok | lost | cancelled: its answer is whole, and is cancelled no more
--   finish   tenant, id, epoch, seq, events  -> ok | lost | cancelled | gone
--   fail     tenant, id, epoch, events  -> ok | lost | cancelled: its last write; its name is free
--   refuse   tenant, id, epoch, events  -> it was not let in: whoever waits under its name hears why
--   renew    tenant, id, epoch  -> ok | lost | cancelled
--   release  tenant, id, epoch, after (µs)  -> whoever claims it then has it
--   claim    owner  -> tenant, id, epoch, how many owners it has killed; or nothing
--   keep     tenant, id, body, events, about  -> ok | full: a run that is whole already
--   describe tenant, id, before, after  -> ok | gone | changed | full: of what is told about it
--   cancel   tenant, id, events  -> none | ended | sealed: it ends soon | cancelled: these are its last words
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
local HEARD = 60 -- s for which a refusal waits for those who retried meanwhile

-- Its name leads to it no more; by then it may be another's.
local function unname(tenant, id)
  local name = call('HGET', key('run', tenant, id), 'name')
  if not name or name == '' then return end
  local at = key('name', tenant, name)
  local holds = call('GET', at)
  if holds and holds:match('^%S+') == id then call('DEL', at) end
end

local function forget_tokens(tenant, id)
  for index = 0, tonumber(call('HGET', key('run', tenant, id), 'answers') or 0) - 1 do
    call('DEL', key('ids', tenant, id, whole(index)))
  end
end

-- It is in nobody's account any more.
local function unaccount(tenant, id)
  local size = tonumber(call('HGET', key('sizes', tenant), id) or 0)
  if size > 0 then call('DECRBY', key('bytes', tenant), whole(size)) end
  call('HDEL', key('sizes', tenant), id)
  call('ZREM', key('all', tenant), id)
  call('ZREM', DUE, tenant .. ':' .. id)
end

local function drop(tenant, id)
  unname(tenant, id)
  forget_tokens(tenant, id)
  unaccount(tenant, id)
  call('DEL', key('events', tenant, id))
  call('PUBLISH', key('told', tenant, id), '')
  return call('DEL', key('run', tenant, id))
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

local function tell(tenant, id, seq, events)
  call('XADD', key('events', tenant, id), seq .. '-0', 'e', events)
  call('HSET', key('run', tenant, id), 'seq', seq)
  call('PUBLISH', key('told', tenant, id), seq .. ' ' .. events)
end

local function write(tenant, id, seq, events)
  tell(tenant, id, seq, events)
  call('EXPIRE', key('events', tenant, id), kept)
  grow(tenant, id, #events)
end

-- What whoever has it by this epoch may do with it.
local function standing(tenant, id, epoch)
  local state, holds, cancelled = unpack(
    call('HMGET', key('run', tenant, id), 'state', 'epoch', 'cancelled'))
  if cancelled then return 'cancelled' end
  return state == 'runs' and holds == epoch and 'ok' or 'lost'
end

local function next_epoch(tenant, id) return call('HINCRBY', key('run', tenant, id), 'epoch', 1) end

local function last_seq(tenant, id) return tonumber(call('HGET', key('run', tenant, id), 'seq')) end

-- Its last write.
local function close(tenant, id, seq, events)
  write(tenant, id, seq, events)
  forget_tokens(tenant, id)
  local run = key('run', tenant, id)
  call('HSET', run, 'state', 'ended')
  call('HDEL', run, 'owner', 'answers')
  call('ZREM', DUE, tenant .. ':' .. id)
end

-- The same of one that is no answer: a retry is a new run.
local function close_failed(tenant, id, events)
  unname(tenant, id)
  close(tenant, id, whole(last_seq(tenant, id) + 1), events)
end

local function lives_on(tenant, id)
  call('ZADD', DUE, whole(now + lease), tenant .. ':' .. id)
end

local ops = {}

function ops.begin(tenant, id, owner, body, name, digest, resumes, about)
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
  if resumes == '1' then return {'none'} end
  if not make_room(tenant, 1, #body + #about) then return {'full'} end
  call('HSET', run, 'state', 'runs', 'owner', owner, 'epoch', 1, 'body', body, 'name', name,
    'seq', 0)
  if about ~= '' then call('HSET', run, 'about', about) end
  call('ZADD', key('all', tenant), whole(now / 1e6), id)
  grow(tenant, id, #body + #about)
  if name ~= '' then call('SET', at, id .. ' ' .. digest, 'EX', kept) end
  lives_on(tenant, id)
  return {'begun', id}
end

function ops.add(tenant, id, epoch, seq, events, ...)
  local verdict = standing(tenant, id, epoch)
  if verdict ~= 'ok' then return verdict end
  lives_on(tenant, id)
  if tonumber(seq) <= last_seq(tenant, id) then return 'ok' end
  if not make_room(tenant, 0, #events) then return 'full' end
  write(tenant, id, seq, events)
  local run, tokens = key('run', tenant, id), {...}
  for i = 1, #tokens, 2 do
    local at = key('ids', tenant, id, tokens[i])
    call('APPEND', at, tokens[i + 1])
    call('EXPIRE', at, kept)
    local answers = tonumber(call('HGET', run, 'answers') or 0)
    call('HSET', run, 'answers', whole(math.max(answers, tonumber(tokens[i]) + 1)))
  end
  return 'ok'
end

function ops.seal(tenant, id, epoch)
  local verdict = standing(tenant, id, epoch)
  if verdict == 'ok' then call('HSET', key('run', tenant, id), 'sealed', 1) end
  return verdict
end

function ops.finish(tenant, id, epoch, seq, events)
  local verdict = standing(tenant, id, epoch)
  if verdict == 'ok' then close(tenant, id, seq, events) end
  if verdict ~= 'lost' then return verdict end
  local state, holds, last = unpack(
    call('HMGET', key('run', tenant, id), 'state', 'epoch', 'seq'))
  if not state then return 'gone' end
  return state == 'ended' and holds == epoch and last == seq and 'ok' or 'lost'
end

function ops.fail(tenant, id, epoch, events)
  local verdict = standing(tenant, id, epoch)
  if verdict == 'ok' then close_failed(tenant, id, events) end
  return verdict
end

function ops.refuse(tenant, id, epoch, events)
  if standing(tenant, id, epoch) ~= 'ok' then return 'lost' end
  local run = key('run', tenant, id)
  local written = last_seq(tenant, id) > 0 -- its owner did not hear of it
  if events == '' or not written and call('HGET', run, 'name') == '' then
    drop(tenant, id)
  elseif written then
    close_failed(tenant, id, events)
  else
    unname(tenant, id)
    unaccount(tenant, id)
    tell(tenant, id, 1, events)
    call('HSET', run, 'state', 'ended')
    call('HDEL', run, 'owner', 'body', 'about') -- it counts as nobody's from here on
    for _, at in ipairs({'run', 'events'}) do call('EXPIRE', key(at, tenant, id), HEARD) end
  end
  return 'ok'
end

function ops.renew(tenant, id, epoch)
  local verdict = standing(tenant, id, epoch)
  if verdict == 'ok' then lives_on(tenant, id) end
  return verdict
end

function ops.release(tenant, id, epoch, after)
  if standing(tenant, id, epoch) == 'ok' then
    next_epoch(tenant, id)
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
    if call('HGET', run, 'state') ~= 'runs' then
      call('ZREM', DUE, due)
    elseif last_seq(tenant, id) == 0 then
      drop(tenant, id)
    else
      local before = call('HGET', run, 'owner')
      if before ~= owner then -- whoever claims its own lives, and nobody else had it
        next_epoch(tenant, id)
        call('HSET', run, 'owner', owner)
      end
      lives_on(tenant, id)
      local killed = before ~= '' and before ~= owner
      local taken = call('HINCRBY', run, 'taken', killed and 1 or 0)
      return {tenant, id, call('HGET', run, 'epoch'), whole(taken)}
    end
  end
end

function ops.keep(tenant, id, body, events, about)
  local run = key('run', tenant, id)
  if call('EXISTS', run) == 1 then return 'ok' end
  if not make_room(tenant, 1, #body + #events + #about) then return 'full' end
  call('HSET', run, 'state', 'ended', 'body', body, 'name', '')
  if about ~= '' then call('HSET', run, 'about', about) end
  call('ZADD', key('all', tenant), whole(now / 1e6), id)
  grow(tenant, id, #body + #about)
  write(tenant, id, 1, events)
  return 'ok'
end

-- Nothing makes room for it: that may be the run itself.
function ops.describe(tenant, id, before, after)
  local run = key('run', tenant, id)
  local about = call('HGET', run, 'about')
  if not about then return 'gone' end
  if about ~= before then return 'changed' end
  if not fits(tenant, 0, #after - #before) then return 'full' end
  call('HSET', run, 'about', after)
  call('HINCRBY', key('sizes', tenant), id, whole(#after - #before))
  call('INCRBY', key('bytes', tenant), whole(#after - #before))
  return 'ok'
end

function ops.cancel(tenant, id, events)
  local run = key('run', tenant, id)
  local state, sealed = unpack(call('HMGET', run, 'state', 'sealed'))
  if not state then return 'none' end
  if state == 'ended' then return 'ended' end
  if sealed then return 'sealed' end
  close_failed(tenant, id, events)
  call('HSET', run, 'cancelled', 1)
  return 'cancelled'
end

function ops.drop(tenant, id) return drop(tenant, id) end

return ops[op](unpack(ARGV, 6))
