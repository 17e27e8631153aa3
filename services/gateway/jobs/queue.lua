-- Queues of durable jobs. One call is one atomic step.
--
-- A queue is a Redis Stream with one consumer group, whose consumers are gateways. A job that was
-- claimed is pending until its gateway says what became of it; one whose gateway has been silent for
-- a lease is claimed anew. So each job is carried out at least once, and who carries it out sees to
-- it that twice is the same as once.
--
-- Queues are of a kind (what is to be done) and of a tenant. The tenant that has the fewest jobs under
-- way at a gateway is served first there, of those that have as many the one that was not for the
-- longest time; and in each its queues in turn. So tenants have equal parts of a gateway's places,
-- however long their jobs take, and one alone has all.
--
-- Keys, all below KEYS[1] (one hash slot). No name of a part has a colon.
--   :tenants:<kind>                  zset    tenant -> when it was looked at last, µs
--   :open:<kind>:<tenant>            zset    queue -> when it was looked at last, or goes on, µs
--   :todo:<kind>:<tenant>:<queue>    stream  j: a job
--   :later:<kind>:<tenant>:<queue>   zset    a job -> when it is to be done, µs
--   :dead                            stream  what nobody will try again: kind, tenant, queue, job, why
--
-- ARGV: op, then
--   fill     kind, tenant, queue, number of the first (from 1), job...  before it is open, in order
--   open     kind, tenant, queue
--   add      kind, tenant, queue, delay (µs), job...
--   put_off  kind, tenant, queue, delay (µs), job: one that is there with a delay
--   claim    kind, owner, lease (ms), (tenant, how many jobs of it the owner has)*
--                                        -> tenant, queue, id, job, how often it was claimed; or none
--   renew    kind, tenant, queue, id, owner  -> ok | lost
--   done     kind, tenant, queue, id
--   later    kind, tenant, queue, id, owner, job, delay (µs): instead of what was claimed
--   release  kind, tenant, queue, id, owner: others may have it at once
--   pause    kind, tenant, queue, for (µs): none of it is claimed
--   bury     kind, tenant, queue, id, owner, job, why, most (dead ones that are kept)
--   close    kind, tenant, queue, lease (ms)  -> how many are under way; no other is claimed
--   drop     kind, tenant, queue
--   counts   kind                        -> waiting, under way

local root, op = KEYS[1], ARGV[1]
local call = redis.call
local time = call('TIME')
local now = tonumber(time[1]) * 1e6 + tonumber(time[2])
local GROUP = 'gateways'
local LOOKS = 64 -- at tenants, and at the queues of each, in one call
local MOVED = 16 -- jobs that are due, in one look

local function key(...) return table.concat({root, ...}, ':') end
local function whole(x) return string.format('%.0f', x) end

local function grouped(todo)
  if call('EXISTS', todo) == 0 then call('XGROUP', 'CREATE', todo, GROUP, '0', 'MKSTREAM') end
end

local function put(kind, tenant, queue, ...)
  local todo = key('todo', kind, tenant, queue)
  grouped(todo)
  for _, job in ipairs({...}) do call('XADD', todo, '*', 'j', job) end
end

local function opened(kind, tenant, queue)
  call('ZADD', key('open', kind, tenant), 'NX', whole(now), queue)
  call('ZADD', key('tenants', kind), 'NX', whole(now), tenant)
end

local function remove(todo, id)
  call('XACK', todo, GROUP, id)
  return call('XDEL', todo, id)
end

-- Whether it is still the owner's to say what becomes of it.
local function is_owners(todo, id, owner)
  if call('EXISTS', todo) == 0 then return false end
  local pending = call('XPENDING', todo, GROUP, id, id, 1)[1]
  return pending and pending[2] == owner, pending
end

local function job_of(entry) return entry[1], entry[2][2] end

-- Whose gateway was silent for a lease, or what nobody has had.
local function next_of(todo, owner, lease)
  while true do
    local silent = call('XPENDING', todo, GROUP, 'IDLE', lease, '-', '+', 1)[1]
    if not silent then break end
    local entry = call('XCLAIM', todo, GROUP, owner, lease, silent[1])[1]
    if entry then
      local id, job = job_of(entry)
      return id, job, silent[4] + 1
    end
    remove(todo, silent[1])
  end
  local found = call('XREADGROUP', 'GROUP', GROUP, owner, 'COUNT', 1, 'STREAMS', todo, '>')
  if not found then return end
  local id, job = job_of(found[1][2][1])
  return id, job, 1
end

local ops = {}

function ops.fill(kind, tenant, queue, first, ...)
  local todo = key('todo', kind, tenant, queue)
  grouped(todo)
  local last = call('XREVRANGE', todo, '+', '-', 'COUNT', 1)[1]
  local there = last and tonumber(last[1]:match('%d+$')) or 0
  for i, job in ipairs({...}) do
    local number = tonumber(first) + i - 1
    if number > there then call('XADD', todo, '0-' .. whole(number), 'j', job) end
  end
end

ops.open = opened

function ops.add(kind, tenant, queue, delay, ...)
  if tonumber(delay) > 0 then
    local later, due = key('later', kind, tenant, queue), whole(now + tonumber(delay))
    for _, job in ipairs({...}) do call('ZADD', later, due, job) end
  else
    put(kind, tenant, queue, ...)
  end
  opened(kind, tenant, queue)
end

function ops.put_off(kind, tenant, queue, delay, job)
  call('ZADD', key('later', kind, tenant, queue), 'XX', whole(now + tonumber(delay)), job)
end

local function in_turn(tenants, ...)
  local told, has, turn = {...}, {}, {}
  for i = 1, #told, 2 do has[told[i]] = tonumber(told[i + 1]) end
  local found = call('ZRANGE', tenants, 0, LOOKS - 1)
  for i, tenant in ipairs(found) do turn[tenant] = i end
  table.sort(found, function(a, b)
    local of_a, of_b = has[a] or 0, has[b] or 0
    if of_a ~= of_b then return of_a < of_b end
    return turn[a] < turn[b]
  end)
  return found
end

function ops.claim(kind, owner, lease, ...)
  local tenants = key('tenants', kind)
  for _, tenant in ipairs(in_turn(tenants, ...)) do
    local open = key('open', kind, tenant)
    call('ZADD', tenants, whole(now), tenant)
    for _, queue in ipairs(call('ZRANGEBYSCORE', open, '-inf', whole(now), 'LIMIT', 0, LOOKS)) do
      local todo, later = key('todo', kind, tenant, queue), key('later', kind, tenant, queue)
      local due = call('ZRANGEBYSCORE', later, '-inf', whole(now), 'LIMIT', 0, MOVED)
      for _, job in ipairs(due) do
        call('ZREM', later, job)
        put(kind, tenant, queue, job)
      end
      if call('XLEN', todo) == 0 and call('EXISTS', later) == 0 then
        call('ZREM', open, queue)
        call('DEL', todo)
      else
        call('ZADD', open, whole(now), queue)
        grouped(todo)
        local id, job, claims = next_of(todo, owner, lease)
        if id then return {tenant, queue, id, job, claims} end
      end
    end
    if call('EXISTS', open) == 0 then call('ZREM', tenants, tenant) end
  end
  return {}
end

function ops.renew(kind, tenant, queue, id, owner)
  local todo = key('todo', kind, tenant, queue)
  if not is_owners(todo, id, owner) then return 'lost' end
  call('XCLAIM', todo, GROUP, owner, 0, id, 'JUSTID')
  return 'ok'
end

function ops.done(kind, tenant, queue, id)
  return remove(key('todo', kind, tenant, queue), id)
end

function ops.later(kind, tenant, queue, id, owner, job, delay)
  local todo = key('todo', kind, tenant, queue)
  if not is_owners(todo, id, owner) then return end
  call('ZADD', key('later', kind, tenant, queue), whole(now + tonumber(delay)), job)
  remove(todo, id)
end

function ops.release(kind, tenant, queue, id, owner)
  local todo = key('todo', kind, tenant, queue)
  local owns, pending = is_owners(todo, id, owner)
  if not owns then return end
  call('XCLAIM', todo, GROUP, owner, 0, id, 'IDLE', 1e9, 'RETRYCOUNT', pending[4] - 1, 'JUSTID')
end

function ops.pause(kind, tenant, queue, time)
  call('ZADD', key('open', kind, tenant), 'XX', whole(now + tonumber(time)), queue)
end

function ops.bury(kind, tenant, queue, id, owner, job, why, most)
  local todo = key('todo', kind, tenant, queue)
  if not is_owners(todo, id, owner) then return end
  remove(todo, id)
  call('XADD', key('dead'), 'MAXLEN', most, '*',
    'kind', kind, 'tenant', tenant, 'queue', queue, 'job', job, 'why', why)
end

function ops.close(kind, tenant, queue, lease)
  call('ZREM', key('open', kind, tenant), queue)
  local todo = key('todo', kind, tenant, queue)
  if call('EXISTS', todo) == 0 then return 0 end
  local pending = call('XPENDING', todo, GROUP)[1]
  if pending == 0 then return 0 end
  return pending - #call('XPENDING', todo, GROUP, 'IDLE', lease, '-', '+', pending)
end

function ops.drop(kind, tenant, queue)
  call('ZREM', key('open', kind, tenant), queue)
  call('DEL', key('todo', kind, tenant, queue), key('later', kind, tenant, queue))
end

function ops.counts(kind)
  local waiting, running = 0, 0
  for _, tenant in ipairs(call('ZRANGE', key('tenants', kind), 0, -1)) do
    for _, queue in ipairs(call('ZRANGE', key('open', kind, tenant), 0, -1)) do
      local todo = key('todo', kind, tenant, queue)
      waiting = waiting + call('ZCARD', key('later', kind, tenant, queue))
      if call('EXISTS', todo) == 1 then
        local pending = call('XPENDING', todo, GROUP)[1]
        waiting, running = waiting + call('XLEN', todo) - pending, running + pending
      end
    end
  end
  return {waiting, running}
end

return ops[op](unpack(ARGV, 2))
